"""`megatron-elastic reap`: a model with fewer experts, the best of every layer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_elastic.cli.calibration import LONGEST_DEFAULT, TOKENS_DEFAULT, DataOption, FilesOption, Job, TextOptions, TokenizerOption

if TYPE_CHECKING:
    from rich.table import Table

    from megatron_elastic.export.sources import Source
    from megatron_elastic.importance.ranking import Ranking
    from megatron_elastic.importance.reap import Kept, LayerCut


def command(  # noqa: PLR0913 - one argument an option
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run, a megatron checkpoint, or a Hugging Face directory.")],
    keep: Annotated[float | None, typer.Option(help="Share of the experts that stays in every layer.")] = None,
    keep_experts: Annotated[int | None, typer.Option(help="How many experts stay in every layer, instead of --keep.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write.")] = None,
    format: Annotated[
        Literal["megatron", "hf"], typer.Option(help="megatron: torch_dist checkpoint; hf: Hugging Face directory.")
    ] = "megatron",  # noqa: A002
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be lost and write nothing.")] = False,
    ranking: Annotated[
        Path | None, typer.Option(help="The file that `rank` wrote for this model; default: experts are scored here.")
    ] = None,
    criterion: Annotated[
        Literal["reap", "frequency", "gate", "random"] | None, typer.Option(help="What experts are scored by; default: reap.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help=f"Tokens to score on; default: {TOKENS_DEFAULT}.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help=f"Tokens of a row; default: up to {LONGEST_DEFAULT}.")] = None,
    data: DataOption = None,
    text: FilesOption = None,
    tokenizer: TokenizerOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order of --data, and of random scores; default: 0.")] = None,
) -> None:
    """Keep the best experts of a mixture of experts, without training (REAP).

    Every layer, and every group of a group-limited router, keeps as many, in their order. Shared experts stay; nothing is rescaled.
    Experts are scored here on one process. On a model too large for that, `rank` scores a recipe's parent on any layout (tensor, expert,
    pipeline parallel), and its file goes to --ranking.

    \b
    Examples:
      megatron-elastic reap models/Qwen3-30B-A3B --keep 0.5 --text stdlib --format hf --out reaped
      megatron-elastic reap runs/moe --keep-experts 96 --data data/code --dry-run
      torchrun --nproc-per-node 8 -m megatron_elastic.cli.main rank recipes/moe.yaml --depth-tokens 0 --out moe.ranking
      megatron-elastic reap runs/moe --keep 0.75 --ranking moe.ranking --out runs/moe-reaped
    """
    from megatron_elastic.export.sources import family_to_write, open_source
    from megatron_elastic.importance.reap import best_experts, number_to_keep, reaped_shape

    asked = {"--criterion": criterion, "--seed": seed, "--tokens": tokens, "--sequence-length": sequence_length}
    asked |= {"--data": data, "--text": text, "--tokenizer": tokenizer}
    _check_options(out, dry_run, ranking, criterion, [name for name, value in asked.items() if value is not None])
    source = open_source(path)
    _check_source(source)
    number = number_to_keep(source.shape, keep, keep_experts)
    if format == "hf":
        family_to_write(source, reaped_shape(source.shape, number))  # refuses before the experts are scored
    if ranking is not None:
        scores = _read(ranking, source)
    elif criterion == "random":
        scores = _random(source, seed or 0)
    else:
        length, seed, tokens = sequence_length, seed or 0, TOKENS_DEFAULT if tokens is None else tokens
        options = TextOptions(tokens=tokens, sequence_length=length, data=data, text=text or (), tokenizer=tokenizer, seed=seed)
        scores = _score(path, criterion or "reap", options)
    kept = best_experts(scores, number)
    _show(source, scores, kept, number)
    if out is not None and not dry_run:
        _write(source, scores, kept, number, out, hugging_face=format == "hf")


def _check_options(out: Path | None, dry_run: bool, ranking: Path | None, criterion: str | None, given: list[str]) -> None:
    """Raise for options that contradict each other. given: those that say how to score."""
    from megatron_elastic.errors import CheckpointError, ConfigError

    if out is None and not dry_run:
        raise ConfigError("--out is missing; name a directory to write, or add --dry-run to look")
    if out is not None and out.exists():
        raise CheckpointError(f"--out {str(out)!r} exists; choose another path or delete it")
    if ranking is not None and given:
        raise ConfigError(f"{' and '.join(given)}: --ranking brings the scores; leave out one or the other")
    if criterion == "random" and (of_text := [name for name in given if name not in ("--criterion", "--seed")]):
        raise ConfigError(f"{' and '.join(of_text)}: --criterion random reads no text; leave that out")
    if ranking is None and criterion != "random" and not {"--data", "--text"} & set(given):
        raise ConfigError("there is nothing to score experts by; give --text FILE, --data DIR or --ranking FILE")


def _check_source(source: Source) -> None:
    """Raise CheckpointError for a model without experts, or with a family whose plans would name others."""
    from megatron_elastic.errors import CheckpointError
    from megatron_elastic.export.sources import describe

    if not source.shape.has("moe"):
        raise CheckpointError(
            f"{describe(source)} has no experts (layer_pattern {source.shape.layer_pattern!r}); reap a mixture of experts, or extract a plan"
        )
    if source.plans:
        raise CheckpointError(f"{describe(source)} holds a trained family, whose plans count its experts; reap its parent, or a member")


def _read(file: Path, source: Source) -> Ranking:
    """The ranking in a file. Raises CheckpointError when it is another model's or scores no experts."""
    from megatron_elastic.axes import ElasticAxis
    from megatron_elastic.errors import CheckpointError
    from megatron_elastic.importance.ranking import check_model, read_ranking

    found = read_ranking(file)
    check_model(found, file, source.shape, source.tensors)
    if ElasticAxis.EXPERTS not in found.scores:
        raise CheckpointError(f"ranking {str(file)!r} does not score experts; rank the model again")
    return found


def _random(source: Source, seed: int) -> Ranking:
    """Experts by chance: what every criterion should beat."""
    from megatron_elastic.axes import ElasticAxis
    from megatron_elastic.platform import prepare_platform

    prepare_platform()
    from megatron_elastic.importance.collect import with_random
    from megatron_elastic.importance.criteria import ExpertCriterion
    from megatron_elastic.importance.ranking import Ranking, fingerprint_of

    axis, model = ElasticAxis.EXPERTS, {"path": str(source.path), "fingerprint": fingerprint_of(source.tensors, source.shape)}
    return Ranking(source.shape, {axis: ExpertCriterion.RANDOM.value}, {axis: with_random({}, source.shape, seed)[axis]}, {"model": model})


def _score(path: Path, criterion: str, options: TextOptions) -> Ranking:
    """Experts scored on text. Raises what `Job.rank` raises."""
    from megatron_elastic.importance.criteria import CriterionName
    from megatron_elastic.platform import prepare_platform
    from megatron_elastic.preemption import listening

    with listening() as stop:
        prepare_platform()
        from megatron_elastic.train.faults import ending

        job = Job.of(path, (), stop)
        with ending(job.parallel):
            ranked = job.rank(options, criterion=CriterionName.RANDOM, experts=criterion)  # widths are not asked for
    assert ranked is not None, "a path is ranked on one process"
    return ranked.ranking


def _show(source: Source, ranking: Ranking, kept: Kept, number: int) -> None:
    """A table of the layers, the size before and after, and a warning for layers whose experts the text hardly reaches."""
    from megatron_elastic.axes import ElasticAxis
    from megatron_elastic.cli.show import print_table
    from megatron_elastic.describe import sizes
    from megatron_elastic.importance.experts import rare_experts
    from megatron_elastic.importance.reap import expert_tokens, layer_cuts, reaped_shape

    print_table(_table(layer_cuts(ranking, kept), ranking.criteria[ElasticAxis.EXPERTS]))
    before, after = sizes(source.shape), sizes(reaped_shape(source.shape, number))
    typer.echo(f"parameters: {before[0]:,} to {after[0]:,} ({after[0] / before[0] - 1:+.1%}); active: {before[1]:,} to {after[1]:,}")
    if tokens := expert_tokens(ranking):
        for line in rare_experts(tokens, ranking.provenance["tokens"]):
            typer.echo(f"warning: {line}", err=True)


def _table(cuts: list[LayerCut], criterion: str) -> Table:
    """A row for each layer with experts."""
    from rich.table import Table

    table = Table("layer", box=None, pad_edge=False)
    for title in ("experts kept", f"{criterion} lost", "tokens rerouted"):
        table.add_column(title, justify="right", no_wrap=True)
    for cut in cuts:
        shares = ("-" if share is None else f"{share:.1%}" for share in (cut.saliency, cut.tokens))
        table.add_row(str(cut.layer), f"{cut.kept} of {cut.experts}", *shares)
    return table


def _write(source: Source, ranking: Ranking, kept: Kept, number: int, out: Path, *, hugging_face: bool) -> None:
    """The cut model, read and written one tensor at a time."""
    from dataclasses import replace

    from megatron_elastic.cli.show import counted
    from megatron_elastic.describe import sizes
    from megatron_elastic.export.write import Options, write_member
    from megatron_elastic.importance.reap import reaped_provenance, reaped_record, reaped_shape, select_experts

    cut = replace(
        source,
        shape=reaped_shape(source.shape, number),
        tensors=select_experts(source.tensors, source.shape, kept),
        space=None,
        provenance=reaped_provenance(source.provenance, reaped_record(ranking, kept), sizes(source.shape)[0]),
    )
    options = Options(hugging_face=hugging_face, watch=lambda member: counted(member, f"writing {out.name}"))
    for line in write_member(cut, None, out, options):
        typer.echo(line)
