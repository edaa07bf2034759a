"""Streamed safetensors are read back bit for bit by safetensors and by transformers; after an error nothing is there."""

from __future__ import annotations

import errno
import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from megatron_elastic.checkpoint.new_directory import new_directory
from megatron_elastic.errors import CheckpointError
from megatron_elastic.hf.weights import INDEX, SINGLE, HfWeights
from megatron_elastic.hf.write import write_weights

TENSORS = {
    "norm": torch.randn(7, dtype=torch.bfloat16),  # an odd number of bytes / 2: what follows would not be aligned
    "bias": torch.randn(5),
    "experts": torch.randn(3, 5, 7).half(),
    "scale": torch.tensor(0.3),
    "scale_in_bf16": torch.tensor(-2.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(6, 9).T,
    "view": torch.randn(100, 8)[3:5],
    "trained": torch.randn(4, requires_grad=True),
    "not a number": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
}


def entries(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)


def test_one_file_is_read_by_safetensors(tmp_path):
    write_weights(tmp_path, TENSORS.items(), entries(TENSORS))
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]
    with safe_open(tmp_path / SINGLE, framework="pt") as file:
        assert file.metadata() == {"format": "pt"} and set(file.keys()) == set(TENSORS)
        assert all(same_bits(file.get_tensor(name), tensor) for name, tensor in TENSORS.items())


def test_nothing_is_held_of_a_tensor_when_the_next_is_asked_for(tmp_path):
    def one_after_another():
        held = None
        for name in ("first", "second", "third"):
            assert held is None or held() is None, f"a tensor is still held when {name} is made"
            numbers = np.ones(1000, dtype=np.float32)
            held = weakref.ref(numbers)
            tensor = torch.from_numpy(numbers)
            del numbers
            yield name, tensor
            del tensor

    write_weights(tmp_path, one_after_another(), dict.fromkeys(("first", "second", "third"), (torch.float32, (1000,))))


def test_tensors_are_aligned(tmp_path):
    write_weights(tmp_path, TENSORS.items(), entries(TENSORS))
    data = (tmp_path / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0 for name, tensor in TENSORS.items())


@pytest.mark.parametrize("shard_bytes", [1, 100, 200])
def test_several_shards_have_an_index(tmp_path, shard_bytes):
    write_weights(tmp_path, iter(TENSORS.items()), entries(TENSORS), shard_bytes=shard_bytes)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)] and len(shards) > 1
    for shard in shards:
        with safe_open(tmp_path / shard, framework="pt") as file:
            held = file.keys()
            assert len(held) == 1 or sum(TENSORS[name].nbytes for name in held) <= shard_bytes
    weights = HfWeights(tmp_path)
    assert all(same_bits(weights[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("shard_bytes", [10_000, 10**9])
def test_transformers_reads_them(tmp_path, shard_bytes):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=40, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4)
    state = transformers.LlamaForCausalLM(config).state_dict()
    config.save_pretrained(tmp_path)
    write_weights(tmp_path, state.items(), entries(state), shard_bytes=shard_bytes)
    assert (tmp_path / INDEX).is_file() == (shard_bytes == 10_000)
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_tensors_are_asked_for_one_at_a_time(tmp_path):
    given = []

    def stream() -> Any:
        for name in "abc":
            given.append((name, sum(file.stat().st_size for file in tmp_path.iterdir())))
            yield name, torch.ones(300_000)

    write_weights(tmp_path, stream(), {name: (torch.float32, (300_000,)) for name in "abc"})
    sizes = [size for _, size in given]
    assert sizes[1] >= 1_200_000 - 2**16 and sizes[2] >= 2_400_000 - 2**16  # what came before is already in the file


BAD: dict[str, tuple[list[tuple[str, torch.Tensor]], str]] = {
    "missing": ([("a", torch.ones(2))], "tensor b was not given"),
    "none": ([], "tensor a was not given"),
    "extra": ([("a", torch.ones(2)), ("b", torch.ones(3)), ("c", torch.ones(1))], "tensor c is not one of those to be written"),
    "twice": ([("a", torch.ones(2)), ("b", torch.ones(3)), ("a", torch.ones(2))], "tensor a is not .* or came twice"),
    "order": ([("b", torch.ones(3)), ("a", torch.ones(2))], "tensor b came where a was due"),
    "shape": ([("a", torch.ones(2)), ("b", torch.ones(1, 3))], r"tensor b is torch.float32 \[1, 3\], not torch.float32 \[3\]"),
    "type": ([("a", torch.ones(2).half())], r"tensor a is torch.float16 \[2\], not torch.float32 \[2\]"),
}


@pytest.mark.parametrize("shard_bytes", [1, 10**9])
@pytest.mark.parametrize("name", BAD)
def test_what_is_written_must_be_what_was_announced(tmp_path, name, shard_bytes):
    tensors, message = BAD[name]
    wanted = {"a": (torch.float32, (2,)), "b": (torch.float32, (3,))}
    with pytest.raises(CheckpointError, match=message) as caught, new_directory(tmp_path / "out") as directory:
        write_weights(directory, tensors, wanted, shard_bytes=shard_bytes)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_types_that_are_not_written_are_refused_before_anything_is_read(tmp_path):
    def untouched() -> Any:
        raise AssertionError("a tensor was read")
        yield

    with pytest.raises(CheckpointError, match="b is torch.float64, .* only torch.float32, torch.bfloat16, torch.float16"):
        write_weights(tmp_path, untouched(), {"a": (torch.float32, (2,)), "b": (torch.float64, (3,))})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    opened = Path.open

    class Full:
        """A file on a disk that takes the header and no more."""

        def __init__(self, file: Any) -> None:
            self.file, self.writes = file, 0

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def seek(self, place: int) -> None:
            self.file.seek(place)

        def fileno(self) -> int:
            return self.file.fileno()

        def write(self, data: bytes) -> None:
            self.writes += 1
            if self.writes > 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.file.write(data)

    def full(path: Path, mode: str = "r", **kwargs: Any) -> Any:
        file = opened(path, mode, **kwargs)
        return Full(file) if path.suffix == ".safetensors" else file

    monkeypatch.setattr(Path, "open", full)
    with (
        pytest.raises(CheckpointError, match="out' cannot be written: No space left on device; free space") as caught,
        new_directory(tmp_path / "out") as directory,
    ):
        write_weights(directory, TENSORS.items(), entries(TENSORS))
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []
