"""The tokenizer of a model is the one beside its weights, or that of its run's data, as it was written, and prompts are read one a line.

Run: pytest tests/export/test_prompts.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_elastic.corpus.info import open_data
from megatron_elastic.errors import DataError
from megatron_elastic.export.prompts import check_data_tokenizer, find_tokenizer, read_prompts
from megatron_elastic.export.sources import Source
from megatron_elastic.testing.tiny import tiny_shape
from tests.train.harness import plain_recipe, write_data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has its recipe and its data, and no checkpoint."""
    data = write_data(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(plain_recipe(tmp_path / "run", data)))
    return tmp_path / "run"


def checkpoint(path: Path, assets: Path | None = None, **provenance: Any) -> Source:
    shape = tiny_shape(vocab_size=300, padded_vocab_size=304)
    return Source(path=path, shape=shape, tensors={}, dtypes={}, space=None, plans={}, provenance=provenance, assets=assets)


def save_words(directory: Path) -> None:
    """A tokenizer of four words that does not say which of them ends a document."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "</end>": 1, "number": 2, "says": 3}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))


def change_data(run: Path, **changes: Any) -> None:
    file = run.parent / "data" / "data.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_extracted_checkpoint_knows_the_run_it_comes_from(run: Path, tmp_path: Path) -> None:
    inside, outside = run / "checkpoints" / "a", tmp_path / "elsewhere" / "deep" / "b"
    assert find_tokenizer(checkpoint(inside), None, None).name == "byte"
    assert find_tokenizer(checkpoint(outside, extracted_from=str(inside)), None, None).name == "byte"
    for info in (checkpoint(outside), checkpoint(outside, extracted_from=str(tmp_path / "gone" / "checkpoints" / "a"))):
        with pytest.raises(DataError, match="nothing says which tokenizer .* name one: --tokenizer byte"):
            find_tokenizer(info, None, None)


def test_a_tokenizer_that_has_changed_since_is_refused(run: Path) -> None:
    change_data(run, vocab_size=256)
    with pytest.raises(DataError, match="tokenizer 'byte' has 257 words, not the 256 of .*; restore it; or name the tokenizer"):
        find_tokenizer(checkpoint(run / "checkpoints" / "a"), None, None)


def test_the_data_say_what_ends_a_document(run: Path, tmp_path: Path) -> None:
    save_words(tmp_path)  # no tokenizer_config.json beside it: the word was named with --eod
    change_data(run, tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=4, eod=1)
    found = find_tokenizer(checkpoint(run / "checkpoints" / "a"), None, None)
    assert found.eod == 1 and found.encode("says number").tolist() == [3, 2]
    named = find_tokenizer(checkpoint(run / "checkpoints" / "a"), str(tmp_path))
    with pytest.raises(DataError, match="does not say which word ends a document; name it with --eod"):
        assert named.eod
    assert find_tokenizer(checkpoint(run / "checkpoints" / "a"), str(tmp_path), "</end>").eod == 1


def test_the_tokenizer_beside_the_weights_goes_before_the_run_s(run: Path, tmp_path: Path) -> None:
    inside = run / "checkpoints" / "a"
    assert find_tokenizer(checkpoint(inside, assets=tmp_path), None).name == "byte"  # a model without a tokenizer.json
    save_words(tmp_path)
    assert find_tokenizer(checkpoint(inside, assets=tmp_path), None).name == str(tmp_path)
    assert find_tokenizer(checkpoint(inside, assets=tmp_path), "byte").name == "byte"


def test_data_of_another_tokenizer(run: Path, tmp_path: Path) -> None:
    """Known by name, else by their words; of what is not there any more only the size is compared."""
    inside, data = run / "checkpoints" / "a", tmp_path / "data"
    (tmp_path / "own").mkdir()
    (tmp_path / "copy").mkdir()
    save_words(tmp_path / "own")
    model = checkpoint(inside, assets=tmp_path / "own")
    with pytest.raises(
        DataError, match=r"ids of tokenizer 'byte' \(257 words\), but the model's own is '.*own' \(4 words\); write the text"
    ):
        check_data_tokenizer(model, open_data(data))
    check_data_tokenizer(checkpoint(inside), open_data(data))  # what its run was trained on
    check_data_tokenizer(checkpoint(tmp_path / "elsewhere" / "deep" / "b"), open_data(data))  # nothing is known
    save_words(tmp_path / "copy")
    change_data(run, tokenizer=str(tmp_path / "copy"), vocab_size=4)
    check_data_tokenizer(model, open_data(data))
    words = (tmp_path / "copy" / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "copy" / "tokenizer.json").write_text(words.replace("says", "said"), encoding="utf-8")
    with pytest.raises(DataError, match=r"ids of tokenizer '.*copy' \(4 words\), but the model's own is '.*own' \(4 words\)"):
        check_data_tokenizer(model, open_data(data))
    (tmp_path / "copy" / "tokenizer.json").unlink()
    check_data_tokenizer(model, open_data(data))


def test_prompts_are_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two \n", encoding="utf-8")
    assert read_prompts(file) == ["one", "  two "]
    for content in (b"\n \n", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(DataError, match="--prompts .*prompts.txt' (is empty; give one prompt a line|cannot be read: )"):
            read_prompts(file)
