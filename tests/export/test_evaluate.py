"""`eval`'s numbers are those of a plain cross-entropy over one window after the other, for every kind of parent; a budget's are those of its
extracted member; every token of a document but its first is scored once; text is read as `data` reads it, and cut where asked.

Run: pytest tests/export/test_evaluate.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.axes import SubmodelPlan
from megatron_elastic.checkpoint import open_checkpoint
from megatron_elastic.corpus.sources import is_held_out
from megatron_elastic.corpus.tokenizer import ByteTokenizer, open_tokenizer
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.errors import CheckpointError, ConfigError, DataError
from megatron_elastic.export.evaluate import (
    WINDOWS_TOGETHER,
    Evaluator,
    check_sequence_length,
    packed_rows,
    plans_to_score,
    windows,
)
from megatron_elastic.export.load import load_model
from megatron_elastic.export.texts import Text, held_out_text, read_text
from megatron_elastic.export.write import write_submodel
from megatron_elastic.testing.tiny import tiny_shape
from tests.elastic.family import PARENTS
from tests.export.random_family import write_family
from tests.train.harness import write_data

DOCUMENTS = tuple(
    np.array([(7 * n * n + 3 * n + k) % 131 for n in range(length)], dtype=np.int32) for k, length in enumerate((1, 2, 47, 16, 17))
)
"""Of one token (nothing to score), two, more than two windows, exactly a window, and one more than that."""
LENGTH = 16
SCORED = sum(len(ids) - 1 for ids in DOCUMENTS)


@dataclass
class Family:
    """A family on the disk and in memory."""

    path: Path
    plans: dict[str, SubmodelPlan]
    evaluator: Evaluator


@pytest.fixture(scope="module", params=PARENTS)
def family(request: Any, tmp_path_factory: Any, _one_process: Any) -> Iterator[Family]:
    path = tmp_path_factory.mktemp(request.param) / "family"
    plans = write_family(path, PARENTS[request.param]())
    info, model = open_checkpoint(path), load_model(path, _one_process)
    assert info.space is not None
    handle = elasticize(model, info.space, _one_process, info.shape)
    yield Family(path, plans, Evaluator(model, handle, info.shape, _one_process))


def reference(model: Any, length: int) -> float:
    """Nats per token in fp64, each token from its own window alone, as the protocol says."""
    total = 0.0
    for ids in DOCUMENTS:
        for place in range(1, len(ids)):
            start = (place - 1) // length * length
            before = torch.from_numpy(ids[start:place].astype(np.int64))[None]
            with torch.no_grad():
                logits = model(before, torch.arange(place - start)[None], None)[0, -1, :131].double()
            total -= float(logits.log_softmax(0)[ids[place]])
    return total / SCORED


@pytest.mark.parametrize("length", [LENGTH, 5, 200])
def test_losses_are_those_of_one_window_after_the_other(family: Family, length: int) -> None:
    plans = {"model": None, "small": family.plans["small"]}
    found = family.evaluator.losses(plans, DOCUMENTS, length)
    assert found["model"] == pytest.approx(reference(family.evaluator.model, length), rel=1e-5)
    assert family.evaluator.handle is not None
    with family.evaluator.handle.use(family.plans["small"]):
        assert found["small"] == pytest.approx(reference(family.evaluator.model, length), rel=1e-5)
    assert abs(found["small"] - found["model"]) > 1e-3, "the same loss: the test proves less than it says"


def test_a_budget_scores_as_its_extracted_member(family: Family, tmp_path: Path, parallel: Any) -> None:
    text = Text(name="text", documents=DOCUMENTS, tokens_per_byte=0.4, cut=False)
    evaluator = family.evaluator
    assert evaluator.handle is not None
    plans = plans_to_score(family.plans, evaluator.handle.space)
    advanced: list[int] = []
    scores = evaluator.score(plans, text, LENGTH, advanced.append)
    assert list(scores) == ["parent", "full", "medium", "small"] and scores["parent"] == scores["full"]
    assert sum(advanced) == SCORED == scores["small"].tokens
    for name in ("medium", "small"):
        shape = write_submodel(family.path, family.plans[name], tmp_path / name)
        member = load_model(tmp_path / name, parallel)
        alone = Evaluator(member, None, shape, parallel).score({"model": None}, text, LENGTH)["model"]
        found = scores[name]
        assert found.loss == pytest.approx(alone.loss, rel=1e-5) and alone.to_parent == 1.0
        assert found.parameters == alone.parameters == sum(p.numel() for p in member.parameters())
        assert found.perplexity == math.exp(found.loss)
        assert found.to_parent == pytest.approx(found.perplexity / scores["parent"].perplexity)
        assert found.bits_per_byte == pytest.approx(math.log2(found.perplexity) * 0.4)


def test_a_plan_that_keeps_everything_is_computed_once(family: Family) -> None:
    assert family.evaluator.handle is not None
    plans = plans_to_score(family.plans, family.evaluator.handle.space)
    assert plans["parent"] is plans["full"] is None and None not in (plans["medium"], plans["small"])


def test_damaged_weights_are_named(family: Family) -> None:
    text = Text(name="book.txt", documents=DOCUMENTS, tokens_per_byte=None, cut=False)
    bias = next(p for name, p in family.evaluator.model.named_parameters() if name.endswith("layer_norm_weight"))
    kept = bias.detach().clone()
    try:
        with torch.no_grad():
            bias[0] = float("nan")
        with pytest.raises(CheckpointError, match="parent: its loss on 'book.txt' is nan nats per token, which no trained model gives"):
            family.evaluator.score({"parent": None}, text, LENGTH)
    finally:
        with torch.no_grad():
            bias.copy_(kept)


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), length=st.integers(1, 12))
def test_every_token_but_the_first_is_scored_once(lengths: list[int], length: int) -> None:
    documents = [np.arange(n) + 100 * k for k, n in enumerate(lengths)]
    wanted = [int(token) for ids in documents for token in ids[1:]]
    assert [int(token) for window in windows(documents, length) for token in window[1:]] == wanted
    rows = list(packed_rows(documents, length))
    assert [int(token) for row in rows for token in row.labels[0]] == wanted
    for row in rows:
        assert row.row_tokens <= WINDOWS_TOGETHER * length and row.max_seqlen <= length and bool((row.loss_mask == 1).all())
        for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
            tokens = row.tokens[0, start:end].tolist()
            assert len({token // 100 for token in tokens}) == 1 and row.position_ids[0, start:end].tolist() == list(range(end - start))
            assert tokens[0] % 100 % length == 0 and row.labels[0, start:end].tolist() == [token + 1 for token in tokens]


@pytest.mark.parametrize("length", [0, 513])
def test_windows_are_for_the_model(length: int) -> None:
    check_sequence_length(512, tiny_shape())
    with pytest.raises(ConfigError, match=f"--sequence-length {length} must be between 1 and the model's max_sequence_length 512"):
        check_sequence_length(length, tiny_shape())


def read(source: Path, **options: Any) -> Text:
    return read_text(str(source), ByteTokenizer(), **{"vocab_size": 257, **options})


def texts_of(text: Text) -> list[str]:
    return [ByteTokenizer().decode(ids) for ids in text.documents]


def test_text_is_cut_where_asked(tmp_path: Path) -> None:
    for name, content in (("a.txt", "twelve bytes"), ("b.md", "six é"), ("c.txt", " \n"), ("d.bin", "not read")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    whole = read(tmp_path)
    assert texts_of(whole) == ["twelve bytes", "six é"] and not whole.cut and whole.files_without_text == 2
    assert whole.num_scored == 11 + 5 and whole.tokens_per_byte == 1.0
    for limit, wanted in ((18, ["twelve bytes", "six é"]), (17, ["twelve bytes", "six \ufffd"]), (12, ["twelve bytes"]), (5, ["twelv"])):
        text = read(tmp_path, limit=limit)
        assert texts_of(text) == wanted and text.cut == (limit < 18), limit


def test_bytes_are_those_of_whole_documents(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "é": 1, "text": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))  # nothing says which word ends a document, and nothing asks
    (tmp_path / "a.txt").write_text("é text é text", encoding="utf-8")
    text = read_text(str(tmp_path / "a.txt"), open_tokenizer(str(tmp_path)), vocab_size=3, limit=3)
    assert text.documents[0].tolist() == [1, 2, 1] and text.cut and text.tokens_per_byte == 4 / 15


def test_records_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(json.dumps({"body": f"record {n}"}) for n in range(3)), encoding="utf-8")
    assert texts_of(read(file, key="body")) == ["record 0", "record 1", "record 2"]
    with pytest.raises(DataError, match=r"records.jsonl:1: no text under the key 'text' \(found: body\); name the key with --key"):
        read(file)


def test_a_held_out_split_is_the_text_of_its_files(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    files = sorted((tmp_path / "texts").iterdir(), key=lambda file: file.name)
    wanted = [file.read_text(encoding="utf-8") for file in files if is_held_out(f"texts/{file.name}", 0, 0.3)]
    found = held_out_text(data, vocab_size=257)
    assert texts_of(found) == wanted and len(wanted) > 5 and found.tokens_per_byte == 1.0 and not found.cut
    assert all(ids[-1] != 256 for ids in found.documents)
    assert held_out_text(data, vocab_size=257, limit=100).cut
    description = data / "data.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"tokenizer": "words"}))
    assert held_out_text(data, vocab_size=257).tokens_per_byte is None


BAD: dict[str, tuple[bytes, dict[str, Any], type[Exception], str]] = {
    "empty": (b"", {}, DataError, "is empty"),
    "blank": (b" \n\n", {}, DataError, "no UTF-8 text in the 1 files of "),
    "not UTF-8": (b"\xff\xfe", {}, DataError, "no UTF-8 text in the 1 files of "),
    "one token": (b"x", {}, DataError, "has nothing to score: none of its 1 documents has 2 tokens"),
    "outside": (
        b"zebra",
        {"vocab_size": 120},
        DataError,
        "token id 122 is outside the vocabulary, model.vocab_size is 120; use the tokenizer",
    ),
    "limit": (b"text", {"limit": 1}, ConfigError, "--tokens 1 must be at least 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_text_that_cannot_be_scored_is_refused(case: str, tmp_path: Path) -> None:
    content, options, kind, message = BAD[case]
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(kind, match=message):
        read(tmp_path / "a.txt", **options)


def test_half_a_character_in_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "whole"}\n{"text": "\\ud83d"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="a.jsonl:2: the text under the key 'text' is no Unicode text"):
        read(tmp_path / "a.jsonl")
