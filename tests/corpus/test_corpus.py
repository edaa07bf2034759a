"""`megatron-elastic data`: what is read, how it is split, what is written, and that bad input leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_elastic.cli.data import command
from megatron_elastic.corpus import write
from megatron_elastic.corpus.info import open_data
from megatron_elastic.corpus.sources import find_files, is_held_out, limit_bytes
from megatron_elastic.corpus.tokenizer import ByteTokenizer, open_tokenizer
from megatron_elastic.corpus.write import CorpusOptions, write_data
from megatron_elastic.errors import DataError, StoppedError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A directory of 60 texts, and files that are none."""
    root = tmp_path / "texts"
    (root / "deep").mkdir(parents=True)
    for number in range(60):
        (root / ("deep" if number % 2 else "") / f"{number}.txt").write_text(f"text {number} é " * (number + 1), encoding="utf-8")
    (root / "latin.txt").write_bytes(b"\xe9t\xe9")
    (root / "empty.txt").touch()
    (root / "picture.png").write_bytes(b"png")
    (root / "copy.txt").write_text((root / "2.txt").read_text(encoding="utf-8"), encoding="utf-8")
    return root


def options(*sources: Path | str, **changes: object) -> CorpusOptions:
    return CorpusOptions(sources=tuple(map(str, sources)), **{"holdout": 0.2, **changes})


def documents(path: Path, split: str) -> list[str]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(path / split))
    found = [np.asarray(data[n]) for n in range(len(data))]
    assert all(ids[-1] == 256 and (ids[:-1] < 256).all() for ids in found)
    return [ByteTokenizer().decode(ids) for ids in found]


def test_every_text_is_written_once_and_the_splits_are_disjoint(texts, tmp_path):
    info = write_data(options(texts), tmp_path / "out")
    train, valid = documents(info.path, "train"), documents(info.path, "valid")
    wanted = {(texts / ("deep" if n % 2 else "") / f"{n}.txt").read_text(encoding="utf-8") for n in range(60)}
    assert set(train) | set(valid) == wanted and len(train) + len(valid) == 60
    assert 3 <= len(valid) <= 24
    assert (info.vocab_size, info.eod, info.train.documents, info.valid.documents) == (257, 256, len(train), len(valid))
    assert info.train.tokens == sum(len(text.encode()) + 1 for text in train)
    stored = json.loads((info.path / "data.json").read_text())
    assert (stored["files_without_text"], stored["duplicates_dropped"]) == (1, 1)


def test_the_split_depends_on_names_and_seed_alone(texts, tmp_path):
    first = write_data(options(texts), tmp_path / "a")
    held_out = set(documents(first.path, "valid"))
    (tmp_path / "elsewhere").mkdir()
    moved = texts.rename(tmp_path / "elsewhere" / "texts")
    (moved / "0-comes-first.txt").write_text("another text", encoding="utf-8")
    second = write_data(options(moved), tmp_path / "b")
    assert set(documents(second.path, "valid")) - {"another text"} == held_out
    third = write_data(options(moved, seed=1), tmp_path / "c")
    assert set(documents(third.path, "valid")) - {"another text"} != held_out


def test_a_fraction_of_many_names_is_held_out():
    drawn = sum(is_held_out(f"file-{n}.py", 0, 0.05) for n in range(20000))
    assert 900 < drawn < 1100


def test_a_limit_draws_files_whatever_their_order(texts):
    files = find_files([str(texts)])
    few = limit_bytes(files, 3000, seed=0)
    assert 0 < sum(file.size for file in few) <= 3000 and few != files[: len(few)]
    shuffled = random.Random(0).sample(files, len(files))
    assert {file.name for file in limit_bytes(shuffled, 3000, seed=0)} == {file.name for file in few}


def test_records_of_a_jsonl_file_are_documents(tmp_path):
    source = tmp_path / "records.jsonl"
    source.write_text("\n".join(json.dumps({"body": f"record {n}\n\u2028"}) for n in range(50)) + "\n\n", encoding="utf-8")
    info = write_data(options(source, key="body"), tmp_path / "out")
    assert info.train.documents + info.valid.documents == 50
    with pytest.raises(DataError, match=r"records.jsonl:1: no text under the key 'text' \(found: body\); name the key with --key"):
        write_data(options(source), tmp_path / "b")
    source.write_text('{"text": 1\n', encoding="utf-8")
    with pytest.raises(DataError, match="records.jsonl:1: not a JSON record"):
        write_data(options(source), tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "records.jsonl"]


def test_the_standard_library_is_a_source():
    names = {file.name for file in find_files(["stdlib"])}
    assert {"stdlib/argparse.py", "stdlib/pydoc_data/topics.py"} <= names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ("gone",)}, "source 'gone' does not exist; give a file, a directory or 'stdlib'"),
        ({"include": ("*.rs",)}, "is empty: no file with text named"),
        ({"include": ("latin.txt",)}, "no UTF-8 text in the 1 files"),
        ({"include": ("1.txt",)}, "none of the 1 documents is in the valid split"),
        ({"holdout": 1.5}, "--holdout 1.5 must be between 0 and 1"),
        ({"max_bytes": 0}, "--max-bytes 0 must be at least 1"),
        ({"tokenizer": "gone.json"}, "no tokenizer.json at 'gone.json'"),
        ({"eod": "<end>"}, "needs a Hugging Face tokenizer"),
    ],
)
def test_bad_input_leaves_nothing(texts, tmp_path, changes, message):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=message):
        write_data(CorpusOptions(**{"sources": (str(texts),), **changes}), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_that_exists_is_replaced_only_on_request(texts, tmp_path):
    out = tmp_path / "out"
    first = write_data(options(texts), out)
    with pytest.raises(DataError, match="exists; choose another --out, or replace it with --overwrite"):
        write_data(options(texts, seed=1), out)
    second = write_data(options(texts, seed=1), out, overwrite=True)
    assert second.train.sha256 != first.train.sha256
    with pytest.raises(DataError, match="is not a data directory, so --overwrite does not replace it"):
        write_data(options(texts), texts, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]


def test_a_failed_overwrite_keeps_the_old_data(texts, tmp_path):
    info = write_data(options(texts), tmp_path / "out")
    with pytest.raises(DataError, match="no UTF-8 text"):
        write_data(options(texts, include=("latin.txt",)), tmp_path / "out", overwrite=True)
    assert open_data(tmp_path / "out") == info


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_command_at_the_next_document_and_leaves_the_old_data(texts, tmp_path, monkeypatch, number):
    write_data(options(texts), tmp_path / "out")
    old = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    records = "".join(json.dumps({"text": f"record {n}"}) + "\n" for n in range(100))
    source = tmp_path / "many.jsonl"
    source.write_text(records, encoding="utf-8")
    tokens, taken = write._tokens, []

    def tells(document, tokenizer):
        taken.append(document.name)
        if len(taken) == 5:
            os.kill(os.getpid(), number)
        return tokens(document, tokenizer)

    monkeypatch.setattr(write, "_tokens", tells)
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(StoppedError, match=f"^told to stop by {number.name}; nothing is written; start again$"):
            command([str(source)], tmp_path / "out", overwrite=True)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)  # the command keeps its own: the process would end now
    assert taken == [f"many.jsonl:{n}" for n in range(1, 6)]
    source.unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == old


def test_opening_refuses_what_training_could_not_use(texts, tmp_path):
    out = tmp_path / "out"
    write_data(options(texts), out)
    with pytest.raises(
        DataError, match="a token id outside the vocabulary: .* run up to 256, but model.vocab_size is 256; set it to 257 or more"
    ):
        open_data(out, vocab_size=256)
    with pytest.raises(DataError, match="gone' does not exist; write one with: megatron-elastic data"):
        open_data(tmp_path / "gone")
    with pytest.raises(DataError, match=r"texts' is not a data directory \(no data.json\)"):
        open_data(texts)
    tokens = (out / "train.bin").read_bytes()
    (out / "train.bin").write_bytes(tokens[:-2])
    with pytest.raises(DataError, match=f"train.bin has {len(tokens) - 2} bytes, not {len(tokens)}"):
        open_data(out)
    (out / "valid.idx").unlink()
    with pytest.raises(DataError, match="valid.idx is missing"):
        open_data(out)
    description = json.loads((out / "data.json").read_text())
    (out / "data.json").write_text(json.dumps({**description, "format_version": 9}))
    with pytest.raises(DataError, match="format_version 9 is not 1"):
        open_data(out)


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    text = text.encode("utf-8", errors="ignore").decode()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(np.append(ids, tokenizer.eod)) == text and tokenizer.eod not in ids


def test_a_hugging_face_tokenizer_cannot_be_made_to_end_a_document(texts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        ["a text"], tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    (tmp_path / "tok").mkdir()
    trained.save(str(tmp_path / "tok" / "tokenizer.json"))
    with pytest.raises(DataError, match="does not say which word ends a document; name it with --eod"):
        assert open_tokenizer(str(tmp_path / "tok")).eod
    with pytest.raises(DataError, match="has no word '<stop>'"):
        write_data(options(texts, tokenizer=str(tmp_path / "tok"), eod="<stop>"), tmp_path / "out")
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    tokenizer = open_tokenizer(str(tmp_path / "tok"))
    ids = tokenizer.encode("a text <end> é")
    assert tokenizer.eod not in ids and tokenizer.decode(ids) == "a text <end> é"
    info = write_data(options(texts, tokenizer=str(tmp_path / "tok")), tmp_path / "out")
    assert info.vocab_size == tokenizer.vocab_size > 256 and info.eod == tokenizer.eod


def test_the_command_ends_with_a_table(texts, tmp_path):
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(texts), "--out", str(tmp_path / "out"), "--holdout", "0.2", "--include", "*.txt"])
    assert result.exit_code == 0, result.output
    info = open_data(tmp_path / "out")
    *_, header, train, valid = result.output.rstrip().splitlines()
    assert header.split() == ["split", "documents", "tokens"]
    assert train.split() == ["train", f"{info.train.documents:,}", f"{info.train.tokens:,}"] and len(train.rstrip()) == len(header.rstrip())
    assert valid.split() == ["valid", f"{info.valid.documents:,}", f"{info.valid.tokens:,}"]
