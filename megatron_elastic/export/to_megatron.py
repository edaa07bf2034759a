"""Bring a Hugging Face model to where training starts: a directory laid out as a run that has trained nothing yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from megatron_elastic.checkpoint.files import ASSETS, CHECKPOINTS, RECIPE_FILE
from megatron_elastic.checkpoint.named import write_named
from megatron_elastic.checkpoint.new_directory import new_directory, temporary_name
from megatron_elastic.config import to_plain
from megatron_elastic.describe import short_pattern
from megatron_elastic.errors import CheckpointError
from megatron_elastic.export.member import Member
from megatron_elastic.export.sources import Source, is_hugging_face, open_source
from megatron_elastic.formats import RECIPE
from megatron_elastic.hf.assets import read_origin, save_assets
from megatron_elastic.hf.config import CONFIG
from megatron_elastic.hf.gguf import convert_gguf, find_gguf
from megatron_elastic.shape import ModelShape

PARENT = "parent"
"""Name of the checkpoint among the import's checkpoints."""


@contextmanager
def importable(path: Path, out: Path, *, padded_vocab_size: int | None = None) -> Iterator[Source]:
    """The Hugging Face model at `path`, a directory or a GGUF file, which is de-quantised for as long as the block runs.

    out: where the import will be; the de-quantised model, in fp32 larger than that, is put on the same disk. Raises what `open_source` and
    `convert_gguf` raise, and CheckpointError for anything else, or no room for it.
    """
    if is_hugging_face(path):
        yield open_source(path, padded_vocab_size=padded_vocab_size)
    elif (file := find_gguf(path)) is not None:
        with _dequantised(file, out) as directory:
            yield open_source(directory, padded_vocab_size=padded_vocab_size)
    else:
        raise CheckpointError(f"{str(path)!r} is neither a Hugging Face directory (no {CONFIG}) nor a GGUF file; give one of the two")


@contextmanager
def _dequantised(file: Path, out: Path) -> Iterator[Path]:
    """A GGUF file as a Hugging Face directory of its name, inside a temporary one beside `out`.

    Raises what `convert_gguf` raises, and CheckpointError where nothing can be written.
    """
    place = next(parent for parent in out.absolute().parents if parent.is_dir())
    with ExitStack() as stack:
        try:
            scratch = stack.enter_context(TemporaryDirectory(dir=place, prefix=f"{temporary_name(out).name}-"))
            directory = Path(scratch) / file.stem
            directory.mkdir()
            convert_gguf(file, directory)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{str(place)!r} cannot be written: {reason}; free space there or choose another --out") from None
        yield directory


def import_model(source: Source, member: Member, directory: Path) -> None:
    """Write a Hugging Face source as `directory`: checkpoints/parent (megatron `torch_dist`), assets, and recipe.yaml with its `model:` block.

    member: the whole model. Raises CheckpointError when `directory` exists, a weight is NaN or infinite, or the disk is full; nothing is left
    under the final name then.
    """
    assert source.assets is not None
    with new_directory(directory) as temporary:
        write_named(
            temporary / CHECKPOINTS / PARENT,
            member.tensors(),
            member.shape,
            space=source.space,
            plans=source.plans,
            provenance=source.provenance,
        )
        save_assets(source.assets, read_origin(source.assets), temporary / ASSETS)
        (temporary / RECIPE_FILE).write_text(recipe_text(member.shape, directory), encoding="utf-8")


def recipe_text(shape: ModelShape, directory: Path) -> str:
    """The beginning of a recipe whose parent is the import in `directory`."""
    model = {key: value for key, value in to_plain(shape).items() if value is not None} | {
        "layer_pattern": short_pattern(shape.layer_pattern)
    }
    recipe = {**RECIPE.stamp, "parent": str(directory), "model": model}
    head = "# Written by `megatron-elastic import`. Add elastic, data and stages: docs/tutorial.md.\n"
    return head + yaml.safe_dump(recipe, sort_keys=False)
