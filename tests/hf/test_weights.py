"""Weights of a Hugging Face directory are read bit for bit, one at a time; each directory that is not whole is refused with one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_elastic.errors import CheckpointError
from megatron_elastic.hf.weights import INDEX, SINGLE, HfWeights

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {
    "embed": torch.randn(11, 6),
    "norm": torch.randn(6, dtype=torch.bfloat16),
    "experts": torch.randn(3, 5, 7).half(),
    "scale": torch.tensor(0.3),
    "empty": torch.empty(0, 4),
}


def write(directory: Path) -> Path:
    """A directory with two shards and an index."""
    directory.mkdir(exist_ok=True)
    names = list(TENSORS)
    shards = {ONE: names[:2], TWO: names[2:]}
    for shard, held in shards.items():
        save_file({name: TENSORS[name] for name in held}, directory / shard, {"format": "pt"})
    places = {name: shard for shard, held in shards.items() for name in held}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def assert_equal(weights: HfWeights) -> None:
    assert set(weights) == set(TENSORS) and len(weights) == len(TENSORS)
    for name, tensor in TENSORS.items():
        assert (weights.shape_of(name), weights.dtype_of(name)) == (tuple(tensor.shape), tensor.dtype)
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor), name


def test_shards_are_read_bit_for_bit(tmp_path):
    assert_equal(HfWeights(write(tmp_path)))


def test_one_file_needs_no_index(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # in some published directories; nobody asks for it
    assert_equal(HfWeights(tmp_path))


def test_links_as_in_the_cache_of_hugging_face(tmp_path):
    blobs, snapshot = write(tmp_path / "blobs"), tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert_equal(HfWeights(snapshot))


def test_what_transformers_saves_is_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=10_000)
    assert (tmp_path / INDEX).is_file()
    weights, state = HfWeights(tmp_path), model.state_dict()
    assert set(weights) == set(state) and all(torch.equal(weights[name], state[name]) for name in state)


def test_a_tensor_can_be_changed_and_the_file_does_not(tmp_path):
    weights, before = HfWeights(write(tmp_path)), (tmp_path / ONE).read_bytes()
    weights["embed"].zero_()
    assert (tmp_path / ONE).read_bytes() == before and torch.equal(weights["embed"], TENSORS["embed"])


def test_asking_for_names_reads_nothing(tmp_path):
    weights = HfWeights(write(tmp_path))
    (tmp_path / ONE).unlink()
    assert "embed" in weights and "embedding" not in weights and weights.shape_of("embed") == (11, 6)
    with pytest.raises(KeyError):
        weights["embedding"]
    with pytest.raises(CheckpointError, match="00001-of-00002.safetensors' cannot be read any more"):
        weights["embed"]


def index(directory: Path, **changes: str | None) -> None:
    """Change the index: None removes a tensor."""
    data = json.loads((directory / INDEX).read_text())
    data["weight_map"] = {name: shard for name, shard in {**data["weight_map"], **changes}.items() if shard is not None}
    (directory / INDEX).write_text(json.dumps(data))


def replace(directory: Path, **more: torch.Tensor) -> None:
    """Write the first shard again with more tensors."""
    save_file({"embed": TENSORS["embed"], "norm": TENSORS["norm"], **more}, directory / ONE)


def only_pickle(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    torch.save(TENSORS, directory / "pytorch_model.bin")


def header(text: bytes) -> Callable[[Path], object]:
    return lambda path: (path / ONE).write_bytes(len(text).to_bytes(8, "little") + text)


def cut(size: int) -> Callable[[Path], object]:
    return lambda path: (path / ONE).write_bytes((path / ONE).read_bytes()[:size])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (only_pickle, r"no safetensors but 'pytorch_model.bin'; pickle can run code and is not read: .*save_pretrained"),
    "nothing": (lambda path: [file.unlink() for file in path.iterdir()], "holds no weights: neither model.safetensors nor"),
    "no index": (lambda path: (path / INDEX).unlink(), "has 'model-00001-of-00002.safetensors', .* but neither model.safetensors nor"),
    "both": (lambda path: save_file(TENSORS, path / SINGLE), "holds both model.safetensors and model.safetensors.index.json; delete"),
    "index is not JSON": (lambda path: (path / INDEX).write_text("{"), "index.json' is not JSON"),
    "index is a list": (lambda path: (path / INDEX).write_text("[]"), "has no weight_map"),
    "index is empty": (lambda path: (path / INDEX).write_text('{"weight_map": {}}'), "has no weight_map"),
    "shards are numbers": (lambda path: (path / INDEX).write_text('{"weight_map": {"embed": 1}}'), "has no weight_map"),
    "missing shard": (lambda path: (path / TWO).unlink(), "names 'model-00002-of-00002.safetensors', which is not there; download"),
    "absolute": (lambda path: index(path, embed="/etc/a.safetensors"), "names '/etc/a.safetensors', not the name of a .safetensors file"),
    "parent": (lambda path: index(path, embed="../a.safetensors"), r"names '../a.safetensors', not the name of"),
    "below": (lambda path: index(path, embed="a/b.safetensors"), "names 'a/b.safetensors', not the name of"),
    "other file": (lambda path: index(path, embed="pytorch_model.bin"), "names 'pytorch_model.bin', not the name of"),
    "truncated": (
        lambda path: cut(300)(path),
        r"00001-of-00002.safetensors' is truncated: it has 300 bytes and its header asks for 4\d\d;",
    ),
    "truncated in the header": (lambda path: cut(20)(path), r"is truncated: it has 20 bytes and its header asks for \d+;"),
    "empty file": (lambda path: cut(0)(path), "is truncated: it has 0 bytes and its header asks for 8;"),
    "no safetensors": (header(b"no JSON "), "is not a safetensors file"),
    "no object": (header(b"[1, 2]  "), "is not a safetensors file"),
    "offsets that do not fit": (
        header(b'{"embed":{"dtype":"F32","shape":[3],"data_offsets":[0,0]}}'),
        "is not a safetensors file",
    ),
    "tensor not in its shard": (lambda path: index(path, lost=ONE), "places 'lost' in 'model-00001-of-00002.safetensors', which does not"),
    "tensor in the other shard": (lambda path: index(path, embed=TWO), "places 'embed' in 'model-00002-of-00002.safetensors', which does"),
    "tensor twice": (
        lambda path: replace(path, scale=TENSORS["scale"]),
        "00002.safetensors' holds 'scale', as 'model-00001.* does; delete",
    ),
    "extra tensors": (
        lambda path: replace(path, **{f"x{n}": torch.zeros(1) for n in range(5)}),
        "holds 'x0', 'x1', 'x2' and 2 more, which '.*index.json' does not name",
    ),
    "type": (
        lambda path: (replace(path, codes=torch.zeros(3, dtype=torch.int8)), index(path, codes=ONE)),
        "00001-of-00002.safetensors': 'codes' is I8, not one of F32, BF16, F16; convert the model",
    ),
    "8 bits": (
        lambda path: (replace(path, q=torch.zeros(3).to(torch.float8_e4m3fn)), index(path, q=ONE)),
        "'q' is F8_E4M3, not one of F32, BF16, F16",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_whole_is_refused_with_one_line(tmp_path, name):
    spoil, message = BAD[name]
    spoil(write(tmp_path))
    with pytest.raises(CheckpointError, match=message) as caught:
        HfWeights(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere' is not a directory"):
        HfWeights(tmp_path / "nowhere")
