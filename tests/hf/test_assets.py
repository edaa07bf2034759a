"""What goes with a model's weights is kept by name and never run; where a model comes from is read from its card, or from what an import wrote.

Run: pytest tests/hf/test_assets.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elastic.errors import CheckpointError
from megatron_elastic.hf.assets import ORIGIN_FILE, Origin, files_of, read_origin, save_assets

KEPT = [
    "LICENSE.txt",
    "NOTICE",
    "USE_POLICY.md",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "tokenizer.json",
    "vocab.json",
]
LEFT = ["README.md", "modeling_x.py", "tokenization_x.py", "pytorch_model.bin", "model.safetensors", "training_args.bin", ".gitattributes"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory as the Hugging Face cache has it: links to files elsewhere."""
    (tmp_path / "blobs").mkdir()
    theirs = tmp_path / "Mine-1B"
    theirs.mkdir()
    for number, name in enumerate([*KEPT, *LEFT, "config.json"]):
        blob = tmp_path / "blobs" / str(number)
        blob.write_text(name, encoding="utf-8")
        (theirs / name).symlink_to(blob)
    (theirs / "tokenizer.model").mkdir()  # no file of that name
    return theirs


def test_what_is_kept(directory: Path, tmp_path: Path) -> None:
    assert [file.name for file in files_of(directory)] == KEPT
    save_assets(directory, Origin("Mine-1B", "mit"), tmp_path / "assets")
    assert sorted(file.name for file in (tmp_path / "assets").iterdir()) == sorted([*KEPT, "config.json", ORIGIN_FILE])
    for file in (tmp_path / "assets").iterdir():
        assert not file.is_symlink() and (file.name == ORIGIN_FILE or file.read_text(encoding="utf-8") == file.name)
    assert read_origin(tmp_path / "assets") == Origin("Mine-1B", "mit")
    save_assets(tmp_path / "assets", Origin(None, None), tmp_path / "again")
    assert read_origin(tmp_path / "again") == Origin(None, None) and files_of(tmp_path / "again") != []


CARDS = {
    "---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n": "apache-2.0",
    "---\nlicense: [mit, other]\n---\n": None,
    "---\n- license\n---\n": None,
    "---\nlicense: {a\n---\n": None,
    "---\nlicense: !!python/object/apply:os.system ['false']\n---\n": None,
    "# A model\nlicense: mit\n": None,
    "---": None,
    "": None,
}


@pytest.mark.parametrize("text", CARDS)
def test_the_licence_of_a_card(text: str, directory: Path) -> None:
    (directory / "README.md").unlink()
    assert read_origin(directory) == Origin("Mine-1B", None)
    (directory / "README.md").write_text(text, encoding="utf-8")
    assert read_origin(directory) == Origin("Mine-1B", CARDS[text])


def test_a_card_in_another_encoding(directory: Path) -> None:
    (directory / "README.md").unlink()
    (directory / "README.md").write_bytes("---\nlicense: mit\n---\nÄ".encode("latin-1"))
    assert read_origin(directory).license is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format_version": 1}', '{"format_version": 1, "name": "x"}', "null"])
def test_a_broken_origin(text: str, tmp_path: Path) -> None:
    (tmp_path / ORIGIN_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"origin.json' cannot be understood: .*; import the model again"):
        read_origin(tmp_path)
