"""What goes with a model's weights is kept by name and never run; where a model comes from is read from its card, or from what an import wrote.

Run: pytest tests/hf/test_assets.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    "qwen.tiktoken",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model.v3",
    "vocab.json",
]
TEMPLATES = ["rag.jinja", "tool_use.jinja"]
LEFT = ["README.md", "modeling_x.py", "tokenization_x.py", "pytorch_model.bin", "model.safetensors", "training_args.bin", ".gitattributes"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory as the Hugging Face cache has it: links to files elsewhere."""
    (tmp_path / "blobs").mkdir()
    theirs = tmp_path / "Mine-1B"
    theirs.mkdir()
    for number, name in enumerate([*KEPT, *LEFT, "config.json"]):
        blob = tmp_path / "blobs" / str(number)
        blob.write_text("{}" if name == "config.json" else name, encoding="utf-8")
        (theirs / name).symlink_to(blob)
    (theirs / "tokenizer.model").mkdir()  # no file of that name
    (theirs / "additional_chat_templates").mkdir()
    for name in (*TEMPLATES, "setup.py"):
        (theirs / "additional_chat_templates" / name).write_text(name, encoding="utf-8")
    return theirs


def test_what_is_kept(directory: Path, tmp_path: Path) -> None:
    assert [file.name for file in files_of(directory)] == KEPT
    save_assets(directory, Origin("Mine-1B", "mit"), tmp_path / "assets")
    names = sorted(str(file.relative_to(tmp_path / "assets")) for file in (tmp_path / "assets").rglob("*") if file.is_file())
    assert names == sorted([*KEPT, *(f"additional_chat_templates/{name}" for name in TEMPLATES), "config.json", ORIGIN_FILE])
    for file in (file for file in (tmp_path / "assets").rglob("*") if file.is_file()):
        assert not file.is_symlink() and (file.name in (ORIGIN_FILE, "config.json") or file.read_text(encoding="utf-8") == file.name)
    assert read_origin(tmp_path / "assets") == Origin("Mine-1B", "mit")
    save_assets(tmp_path / "assets", Origin(None, None), tmp_path / "again")
    assert read_origin(tmp_path / "again") == Origin(None, None) and files_of(tmp_path / "again") != []
    assert len(list((tmp_path / "again" / "additional_chat_templates").iterdir())) == 2


@pytest.mark.parametrize(
    ("path", "config", "name"),
    [
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca", {"_name_or_path": "x/y"}, "Qwen/Qwen3-0.6B"),
        ("hub/models--gpt2/snapshots/607a30d", {}, "gpt2"),
        ("mine/snapshots/607a30d", {}, "607a30d"),
        ("hub/models--a--b/refs/main", {}, "main"),
        ("Mine-1B", {"_name_or_path": "HuggingFaceTB/SmolLM2-135M"}, "HuggingFaceTB/SmolLM2-135M"),
        ("Mine-1B", {"_name_or_path": "/models/mine/out"}, "Mine-1B"),
        ("Mine-1B", {"_name_or_path": "./out"}, "Mine-1B"),
        ("Mine-1B", {"_name_or_path": "runs/out/last"}, "Mine-1B"),
        ("Mine-1B", {"_name_or_path": "gpt2"}, "Mine-1B"),
        ("Mine-1B", {"_name_or_path": ["a/b"]}, "Mine-1B"),
        ("Mine-1B", None, "Mine-1B"),
    ],
)
def test_the_name_of_a_model(path: str, config: dict[str, Any] | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / path).mkdir(parents=True)
    if config is not None:
        (tmp_path / path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_origin(tmp_path / path).name == name
    monkeypatch.chdir(tmp_path / path)
    assert read_origin(Path()).name == name


CARDS = {
    "---\nlicense: apache-2.0\ntags: [x]\n---\n# A model\n": "apache-2.0",
    "---\nlicense: other\n---\n": "other",
    "---\nlicense: other\nlicense_name: llama3.1\n---\n": "other (llama3.1)",
    "---\nlicense: other\nlicense_name: 3.1\nlicense_link: LICENSE\n---\n": "other (3.1, LICENSE)",
    "---\nlicense: other\nlicense_link: https://x.org/a(b)\n---\n": "other (unnamed, https://x.org/a(b))",
    "---\nlicense: other\nlicense_name: |\n  a\n  b\nlicense_link: [x]\n---\n": "other (a b)",
    "---\nlicense: mit\nlicense_name: ignored\n---\n": "mit",
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
