"""`megatron-elastic sort`: a parent whose most important components come first in every group, and that computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from megatron_elastic.axes import ElasticSpace
    from megatron_elastic.export.sources import Source
    from megatron_elastic.importance.ranking import Ranking

TOLERANCE = 1e-5
"""Largest difference of two logits that still counts as the same model (fp32), as a share of the largest logit where that is above 1: sums of
hundreds of terms in another order round by that much through the thirty layers of a real model."""
LONGEST_COMPARED = 64
"""Tokens of the two sequences that logits are compared on."""
SHARD_GROUPS = 8
"""Groups of axes that tensor parallelism divides, where no recipe says how many: those of a recipe that does not, either."""


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run, a megatron checkpoint, or a Hugging Face directory.")],
    ranking: Annotated[Path, typer.Option(help="The file that `rank` wrote for this model.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    recipe: Annotated[
        Path | None,
        typer.Option(
            help=f"Its elastic axes are sorted, over its groups; default: those of PATH's own run, else every ranked axis, over {SHARD_GROUPS} shard groups."
        ),
    ] = None,
    format: Annotated[
        Literal["megatron", "hf"], typer.Option(help="megatron: torch_dist checkpoint; hf: Hugging Face directory.")
    ] = "megatron",  # noqa: A002
) -> None:
    """Sort the components of a parent by importance, so that a smaller plan keeps the best of them.

    Ranked components are dealt over the groups of their axis. The model stays the same: its logits are compared before and after, and nothing is
    written when they differ. Layers stay in place; the order to drop them in is printed, for elastic.drop_order. A checkpoint keeps the ranking, so that
    `report` can show it of the runs that start there.

    \b
    Examples:
      megatron-elastic sort runs/smollm2 --ranking smollm2.ranking --recipe recipes/smollm2_135m.yaml --out runs/smollm2-sorted
      megatron-elastic sort models/SmolLM2-135M --ranking smollm2.ranking --format hf --out sorted
    """
    from megatron_elastic.errors import CheckpointError
    from megatron_elastic.export.sources import describe, open_source
    from megatron_elastic.importance.dealing import drop_order
    from megatron_elastic.importance.ranking import check_model, read_ranking
    from megatron_elastic.importance.sort import SORTED

    if out.exists():
        raise CheckpointError(f"--out {str(out)!r} exists; choose another path or delete it")
    source, found = open_source(path), read_ranking(ranking)
    if source.plans:
        raise CheckpointError(
            f"{describe(source)} holds a trained family, whose plans name components by their place; sort its parent, and train that"
        )
    record = source.provenance.get(SORTED)
    if record is not None and record["ranking"] == found.fingerprint:
        raise CheckpointError(f"{describe(source)} is sorted by this ranking already; use it as it is")
    check_model(found, ranking, source.shape, source.tensors)
    space = _space(source, found, recipe)
    difference, largest = _sort(source, found, space, out, hugging_face=format == "hf")
    typer.echo(f"{out}: sorted {_axes_text(space)}; logits of up to {largest:.1f} differ by at most {difference:.1e}")
    if order := drop_order(found):
        typer.echo(f"layers stay in place; drop them in this order: elastic.drop_order={list(order)}")


def _space(source: Source, ranking: Ranking, recipe: Path | None) -> ElasticSpace:
    """The axes to sort and their groups: the recipe's, else those of the source's run, else every ranked axis with the default groups.

    Raises ConfigError for a recipe without an elastic block or of another model, and for a width that the default groups do not divide.
    """
    from dataclasses import replace

    from megatron_elastic.checkpoint.files import shape_differences
    from megatron_elastic.config import load_recipe
    from megatron_elastic.errors import ConfigError
    from megatron_elastic.export.sources import describe
    from megatron_elastic.space import build_space, parent_width

    if recipe is None and source.space is not None:
        return source.space
    if recipe is None:
        widths = {axis: parent_width(source.shape, axis) for axis in ranking.scores}
        try:
            axes = {axis: (width,) for axis, width in widths.items() if isinstance(width, int)}
            return build_space(source.shape, axes, shard_groups=SHARD_GROUPS)
        except ConfigError as error:
            raise ConfigError(f"{describe(source)} needs groups of its own, give --recipe: {error}") from None
    found = load_recipe(recipe)
    if found.space is None:
        raise ConfigError(f"--recipe {str(recipe)!r} has no elastic block, which names the axes and their groups; add one")
    differences = shape_differences(replace(source.shape, padded_vocab_size=None), replace(found.model, padded_vocab_size=None))
    if differences:
        raise ConfigError(f"--recipe {str(recipe)!r} is not of {describe(source)}: {', '.join(differences)}")
    return found.space


def _axes_text(space: ElasticSpace) -> str:
    """The axes that were sorted, with their groups where there are several."""
    from megatron_elastic.axes import ElasticAxis

    specs = [spec for spec in space.axes if spec.axis not in (ElasticAxis.TOPK, ElasticAxis.LAYERS)]
    return ", ".join(f"{spec.axis.value} over {spec.groups} groups" if spec.groups > 1 else spec.axis.value for spec in specs) or "no axis"


def _sort(source: Source, ranking: Ranking, space: ElasticSpace, out: Path, *, hugging_face: bool) -> tuple[float, float]:
    """Write the sorted model and its ranking, prove it, and only then give it its name; returns the largest difference of two logits, and the largest logit."""
    from dataclasses import replace

    from megatron_elastic.checkpoint.files import RANKING_FILE
    from megatron_elastic.checkpoint.new_directory import publish_new, scratch_beside
    from megatron_elastic.cli.show import counted
    from megatron_elastic.errors import CheckpointError
    from megatron_elastic.export.write import Options, write_member
    from megatron_elastic.importance.dealing import permutations
    from megatron_elastic.importance.ranking import write_ranking
    from megatron_elastic.importance.sort import SORTED, permute, sorted_record

    tensors = permute(source.tensors, source.shape, permutations(ranking, space))
    moved = replace(source, tensors=tensors, provenance={**source.provenance, SORTED: sorted_record(ranking, space)})
    options = Options(hugging_face=hugging_face, watch=lambda member: counted(member, f"writing {out.name}"))
    with scratch_beside(out) as scratch:
        write_member(moved, None, scratch / out.name, options)
        difference, largest = _difference(source, scratch / out.name)
        allowed = TOLERANCE * max(1.0, largest)
        if not difference <= allowed:
            raise CheckpointError(
                f"sorting {str(source.path)!r} would change its logits by {difference:.1e}, more than {allowed:.1e}; nothing was written, please report this"
            )
        if not hugging_face:  # that is made to be given away, and a ranking says where its text and its model lay
            write_ranking(scratch / out.name / RANKING_FILE, ranking)
        publish_new(scratch / out.name, out)
    return difference, largest


def _difference(before: Source, after: Path) -> tuple[float, float]:
    """Largest difference of the logits of two models on random tokens (fp32), and the largest logit; one model is loaded at a time."""
    import torch
    from torch import Tensor

    from megatron_elastic.export.load import load_model
    from megatron_elastic.export.sources import open_source
    from megatron_elastic.parallel import ParallelContext

    length = min(LONGEST_COMPARED, before.shape.max_sequence_length)
    tokens = torch.randint(0, before.shape.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    parallel = ParallelContext.initialize()
    tokens = tokens.to(parallel.device)
    positions = torch.arange(length, device=parallel.device)[None].expand_as(tokens)

    def logits(source: Source) -> Tensor:
        with torch.no_grad():
            return load_model(source, parallel)(tokens, positions, None)[..., : before.shape.vocab_size].cpu()

    try:
        old = logits(before)
        new = logits(open_source(after))
    finally:
        parallel.destroy()
    return float((old - new).abs().max()), float(old.abs().max())
