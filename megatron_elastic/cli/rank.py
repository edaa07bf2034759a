"""`megatron-elastic rank`: how important every component of a parent is, from a little text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatron_elastic.cli.calibration import LONGEST_DEFAULT, TOKENS_DEFAULT, DataOption, FilesOption, Job, TextOptions, TokenizerOption

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from megatron_elastic.cli.calibration import Ranked
    from megatron_elastic.importance.ranking import Ranking

_LEAST = 1e-30
"""Divides by nothing smaller: an expert without tokens scores 0 throughout."""


def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="RECIPE|PATH", help="A recipe, whose parent is ranked; or a run, a checkpoint, a Hugging Face directory."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE | @FILE]...", help="Values over the recipe's, such as stages.short.steps=10, or a YAML file of them."
        ),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="File to write.")],
    tokens: Annotated[int, typer.Option(help="Tokens to rank on.")] = TOKENS_DEFAULT,
    sequence_length: Annotated[
        int | None, typer.Option(help=f"Tokens of a row; default: the recipe's first stage's, else up to {LONGEST_DEFAULT}.")
    ] = None,
    criterion: Annotated[
        Literal["energy", "activation", "minitron", "taylor", "magnitude", "random"], typer.Option(help="What widths are ranked by.")
    ] = "energy",
    experts: Annotated[Literal["reap", "frequency", "gate", "random"], typer.Option(help="What routed experts are ranked by.")] = "reap",
    depth_tokens: Annotated[int, typer.Option(help="Tokens to order layers on, about layers^2 / 2 times over; 0: no order.")] = 2048,
    data: DataOption = None,
    text: FilesOption = None,
    tokenizer: TokenizerOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of --data, and of random scores.")] = 0,
) -> None:
    """Rank the components of every axis of a model by importance, for `sort`.

    SIGTERM or SIGUSR1 to any of its processes ends all with exit code 85, and nothing is written.

    \b
    Examples:
      megatron-elastic rank recipes/demo_hybrid.yaml --out demo.ranking
      megatron-elastic rank models/SmolLM2-135M --text stdlib --tokens 100000 --out smollm2.ranking
      torchrun --nproc-per-node 8 -m megatron_elastic.cli.main rank recipes/nemotron.yaml --out nemotron.ranking
    """
    from megatron_elastic.errors import ConfigError

    if out.exists():
        raise ConfigError(f"--out {str(out)!r} exists; choose another path or delete it")
    if depth_tokens < 0:
        raise ConfigError(f"--depth-tokens {depth_tokens} must be at least 0")
    options = TextOptions(tokens=tokens, sequence_length=sequence_length, data=data, text=text or (), tokenizer=tokenizer, seed=seed)
    from megatron_elastic.preemption import listening

    with listening() as stop:
        from megatron_elastic.platform import prepare_platform

        prepare_platform()
        from megatron_elastic.train.faults import ending

        job = Job.of(path, overrides or [], stop)
        with ending(job.parallel):
            ranked = job.rank(options, criterion=criterion, experts=experts, depth_tokens=depth_tokens)
            if ranked is not None:
                _write(out, ranked)


def _write(out: Path, ranked: Ranked) -> None:
    """The file, and on the screen a table of the axes, how experts were covered, and the order of layers."""
    from rich.console import Console
    from rich.text import Text

    from megatron_elastic.importance.ranking import write_ranking

    ranking, found, order = ranked.ranking, ranked.found, ranked.order
    write_ranking(out, ranking)
    console = Console(highlight=False)
    console.print(Text(f"ranked on {found.tokens:,} tokens"))
    console.print(_axes_table(ranking), soft_wrap=True)
    if found.experts is not None:
        for layer, counts in found.experts.tokens.items():
            typer.echo(
                f"layer {layer}: experts chosen by {int(counts.min()):,} to {int(counts.max()):,} tokens, {float(counts.mean()):,.0f} on average"
            )
        for line in found.experts.warnings():
            typer.echo(f"warning: {line}", err=True)
    if order is not None:
        errors = [*(f"{value:.2g}" for value in order.errors), "-"]
        steps = ", ".join(f"{layer} ({error})" for layer, error in zip(order.drop_order, errors, strict=True))
        typer.echo(f"layers, first dropped first (KL from the whole model without it and those before, nats per token): {steps}")
    typer.echo(f"wrote {out}")


def _axes_table(ranking: Ranking) -> Table:
    """One line an axis: how unevenly importance is spread, and the best and the worst component where there is one order."""
    from rich.table import Table

    from megatron_elastic.axes import ElasticAxis

    table = Table("axis", "by", box=None, pad_edge=False)
    for title in ("orders", "components", "median/best", "worst/best", "best half"):
        table.add_column(title, justify="right", no_wrap=True)
    for axis, by_layer in ranking.scores.items():
        rows = [row for values in by_layer.values() for row in values.reshape(-1, values.shape[-1]).double()]
        widths = sorted({len(row) for row in rows})
        size = f"{widths[0]:,}" if len(widths) == 1 else f"{widths[0]:,} to {widths[-1]:,}"
        numbers = ["-"] * 3 if axis is ElasticAxis.LAYERS else _spread(rows)
        table.add_row(axis.value, ranking.criteria[axis], f"{len(rows):,}", size, *numbers)
    return table


def _spread(rows: Sequence[Tensor]) -> list[str]:
    """Means over orders: the median and the worst component over the best, and what share of all scores the better half has."""
    numbers = [0.0, 0.0, 0.0]
    for row in rows:
        best, total = row.max().clamp(min=_LEAST), row.sum().clamp(min=_LEAST)
        half = row.sort(descending=True).values[: max(1, len(row) // 2)].sum()
        numbers = [
            number + float(value) / len(rows)
            for number, value in zip(numbers, (row.median() / best, row.min() / best, half / total), strict=True)
        ]
    return [f"{numbers[0]:.2f}", f"{numbers[1]:.2f}", f"{numbers[2]:.0%}"]
