"""Full tensors read by name are the model's, whatever layout saved them; what is written from them loads strictly and is identical."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import tiny_run
import torch

from megatron_elastic.checkpoint import NamedTensors, load_checkpoint, save_checkpoint, write_named
from megatron_elastic.checkpoint.streams import CarefulFile
from megatron_elastic.errors import CheckpointError
from megatron_elastic.layout import full_shapes
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import canonical_name
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import random_tensor, randomize_, tiny_shape

SHAPES = {"untied": tiny_run.SHAPE, "tied": tiny_shape(tied_embeddings=True, moe=None, layer_pattern="M*-M", linear_bias=True)}


def build(parallel: ParallelContext, shape: ModelShape, seed: int) -> torch.nn.Module:
    from megatron_elastic.models.build import build_model

    model = build_model(shape, parallel)
    randomize_(model, seed)
    return model


def stacked(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model on one process, experts stacked, taken from the modules themselves."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        name = canonical_name(name)
        if ".local_experts." in name:
            experts.setdefault(re.sub(r"local_experts\.\d+", "experts", name), []).append(parameter)
        else:
            found[name] = parameter
    return found | {name: torch.stack(parts) for name, parts in experts.items()}


def save_on_ranks(rank: int, world_size: int, directory: str, shape: ModelShape, *layout: int) -> None:
    parallel = ParallelContext.initialize(*layout)
    save_checkpoint(Path(directory), model=build(parallel, shape, 3), shape=shape, parallel=parallel)
    parallel.destroy()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_round_trip(parallel, tmp_path, shape):
    model = build(parallel, shape, 3)
    save_checkpoint(tmp_path / "a", model=model, shape=shape, parallel=parallel)
    named = NamedTensors(tmp_path / "a")
    assert {name: tuple(tensor.shape) for name, tensor in named.items()} == full_shapes(shape)
    for name, tensor in stacked(model).items():
        assert torch.equal(named[name], tensor), name
    write_named(tmp_path / "b", reversed(list(named.items())), shape, provenance={"parent": "a"})
    assert NamedTensors(tmp_path / "b").info.provenance == {"parent": "a"}
    other = build(parallel, shape, 4)
    assert load_checkpoint(tmp_path / "b", model=other, shape=shape, parallel=parallel) == {}
    first, second = (
        dict(model.named_parameters()) | dict(model.named_buffers()),
        dict(other.named_parameters()) | dict(other.named_buffers()),
    )
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.dist
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["tensor", "pipeline", "expert"])
def test_names_do_not_depend_on_the_layout(ranks, parallel, tmp_path, layout):
    for name, shape in SHAPES.items():
        if name == "tied" and layout[2] > 1:
            continue
        save_checkpoint(tmp_path / f"one-{name}", model=build(parallel, shape, 3), shape=shape, parallel=parallel)
        ranks(save_on_ranks, 2, str(tmp_path / f"two-{name}"), shape, *layout)
        one, two = NamedTensors(tmp_path / f"one-{name}"), NamedTensors(tmp_path / f"two-{name}")
        assert list(one) == list(two) and all(torch.equal(one[key], two[key]) for key in one)


def load_on_ranks(rank: int, world_size: int, directory: str, shape: ModelShape, *layout: int) -> bool:
    parallel = ParallelContext.initialize(*layout)
    wanted, loaded = build(parallel, shape, 3), build(parallel, shape, 4)
    load_checkpoint(Path(directory), model=loaded, shape=shape, parallel=parallel)
    equal = all(torch.equal(one, other) for one, other in zip(wanted.parameters(), loaded.parameters(), strict=True))
    parallel.destroy()
    return equal


@pytest.mark.dist
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["tensor", "pipeline", "expert"])
def test_written_checkpoints_load_at_other_layouts(ranks, parallel, tmp_path, layout):
    shape = tiny_run.SHAPE
    save_checkpoint(tmp_path / "a", model=build(parallel, shape, 3), shape=shape, parallel=parallel)
    write_named(tmp_path / "b", NamedTensors(tmp_path / "a").items(), shape)
    assert ranks(load_on_ranks, 2, str(tmp_path / "b"), shape, *layout) == [True, True]


def test_what_is_written_must_be_the_model(tmp_path):
    shape = tiny_run.SHAPE
    tensors = {name: random_tensor(name, size, torch.Generator()) for name, size in full_shapes(shape).items()}
    norm = tensors.pop("decoder.final_norm.weight")
    with pytest.raises(CheckpointError, match=r"decoder.final_norm.weight was not given"):
        write_named(tmp_path / "a", tensors.items(), shape)
    with pytest.raises(CheckpointError, match=r"decoder.final_norm.weight has shape \[3\], not \[40\]"):
        write_named(tmp_path / "a", [*tensors.items(), ("decoder.final_norm.weight", norm[:3])], shape)
    with pytest.raises(CheckpointError, match="embedding.word_embeddings.weight was given twice"):
        write_named(tmp_path / "a", [*tensors.items(), next(iter(tensors.items()))], shape)
    assert list(tmp_path.iterdir()) == []


def test_views_are_written_without_their_storage(tmp_path):
    shape = tiny_run.SHAPE
    tensors = ((name, torch.zeros(1000, *size)[0]) for name, size in full_shapes(shape).items())
    write_named(tmp_path / "a", tensors, shape)
    numbers = sum(torch.Size(size).numel() for size in full_shapes(shape).values())
    assert (tmp_path / "a" / "__0_0.distcp").stat().st_size < 4 * numbers + 4000 * len(full_shapes(shape))


def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch):
    shape, write = tiny_run.SHAPE, CarefulFile.write

    def full(self: CarefulFile, data: bytes) -> int:
        self._error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    monkeypatch.setattr(CarefulFile, "write", full)
    with pytest.raises(CheckpointError, match="a' cannot be written: No space left on device"):
        write_named(tmp_path / "a", ((name, torch.ones(size)) for name, size in full_shapes(shape).items()), shape)
    assert list(tmp_path.iterdir()) == []


def test_names_outside_the_model_are_key_errors(tmp_path):
    shape = tiny_run.SHAPE
    write_named(tmp_path / "a", ((name, torch.ones(size)) for name, size in full_shapes(shape).items()), shape)
    named = NamedTensors(tmp_path / "a")
    assert named.shape_of("decoder.layers.0.mixer.conv1d.bias") == (96 + 2 * 28,) and named.dtype_of("output_layer.weight") == torch.float32
    with pytest.raises(KeyError):
        named["output_layer.bias"]
