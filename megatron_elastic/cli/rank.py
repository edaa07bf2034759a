"""`megatron-elastic rank`: how important every component of a parent is, from a little text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from megatron_elastic.export.sources import Source
    from megatron_elastic.importance.collect import Collected
    from megatron_elastic.importance.depth import DepthOrder
    from megatron_elastic.importance.ranking import Ranking
    from megatron_elastic.parallel import ParallelContext
    from megatron_elastic.recipe import Recipe
    from megatron_elastic.train.data import MicroBatch

LONGEST_DEFAULT = 2048
"""Tokens of a row where none are asked for, no recipe says, and the model takes more."""
_LEAST = 1e-30
"""Divides by nothing smaller: an expert without tokens scores 0 throughout."""


def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="RECIPE|PATH", help="A recipe, whose parent is ranked; or a run, a checkpoint, a Hugging Face directory."),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values over the recipe's.")] = None,
    *,
    out: Annotated[Path, typer.Option(help="File to write.")],
    tokens: Annotated[int, typer.Option(help="Tokens to rank on.")] = 65536,
    sequence_length: Annotated[
        int | None, typer.Option(help=f"Tokens of a row; default: the recipe's first stage's, else up to {LONGEST_DEFAULT}.")
    ] = None,
    criterion: Annotated[
        Literal["activation", "minitron", "taylor", "magnitude", "random"], typer.Option(help="What widths are ranked by.")
    ] = "activation",
    experts: Annotated[Literal["reap", "frequency", "gate", "random"], typer.Option(help="What routed experts are ranked by.")] = "reap",
    depth_tokens: Annotated[int, typer.Option(help="Tokens to order layers on, about layers^2 / 2 times over; 0: no order.")] = 1024,
    data: Annotated[Path | None, typer.Option(help="A data directory: its training split.", metavar="DIR")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text or JSONL file, a directory of them, or 'stdlib'; may be repeated.", metavar="FILE|DIR")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="For --text: 'byte' or a tokenizer; default: the model's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of --data, and of random scores.")] = 0,
) -> None:
    """Rank the components of every axis of a model by importance, for `sort`.

    \b
    Examples:
      megatron-elastic rank recipes/demo_hybrid.yaml --out demo.ranking
      megatron-elastic rank models/SmolLM2-135M --text stdlib --tokens 100000 --out smollm2.ranking
      torchrun --nproc-per-node 8 -m megatron_elastic.cli.main rank recipes/nemotron.yaml --out nemotron.ranking
    """
    from megatron_elastic.errors import ConfigError

    if out.exists():
        raise ConfigError(f"--out {str(out)!r} exists; choose another path or delete it")
    for option, value, least in (("--tokens", tokens, 2), ("--depth-tokens", depth_tokens, 0)):
        if value < least:
            raise ConfigError(f"{option} {value} must be at least {least}")
    if data is not None and text:
        raise ConfigError("give one of --data and --text")
    if tokenizer is not None and not text:
        raise ConfigError(f"--tokenizer {tokenizer!r} is for --text; leave it out")
    from megatron_elastic.platform import prepare_platform

    prepare_platform()
    job = _Job.of(path, overrides or [])
    from megatron_elastic.importance.text import check_length

    try:
        length = job.default_length if sequence_length is None else sequence_length
        check_length(length, job.source.shape.max_sequence_length, job.parallel)
        rows, name = job.rows(tokens, length, data, text or [], tokenizer, seed)
        found, order = job.rank(rows, criterion, experts, depth_tokens, seed)
        if job.parallel.is_main:
            about = {"data": name, "tokens": found.tokens, "sequence_length": length, "seed": seed}
            ranking = _ranking(job.source, path, found, order, about)
            _write(out, ranking, found, order)
    finally:
        job.parallel.destroy()


class _Job:
    """A model to rank, loaded, and where its text may come from. recipe: None for a PATH, which is ranked on one process."""

    def __init__(self, source: Source, parallel: ParallelContext, parts: Sequence[Any], recipe: Recipe | None) -> None:
        self.source, self.parallel, self.parts, self.recipe = source, parallel, parts, recipe

    @classmethod
    def of(cls, path: Path, overrides: Sequence[str]) -> _Job:
        """The parent of a recipe on the processes and the layout it asks for, or the model at a path on one process."""
        from megatron_elastic.config import load_recipe
        from megatron_elastic.errors import ConfigError
        from megatron_elastic.export.load import load_model
        from megatron_elastic.export.sources import open_source
        from megatron_elastic.parallel import ParallelContext
        from megatron_elastic.train.loop import start_parallel

        if path.is_file() and path.suffix in (".yaml", ".yml"):
            recipe = load_recipe(path, overrides)
            source = open_source(_parent(recipe))
            parallel = start_parallel(recipe)
            try:
                return cls(source, parallel, _load(source, recipe, parallel), recipe)
            except BaseException:
                parallel.destroy()
                raise
        if overrides:
            raise ConfigError(f"{overrides[0]!r} is for recipes; {str(path)!r} is none")
        source, parallel = open_source(path), ParallelContext.initialize()
        try:
            if parallel.world_size > 1:
                raise ConfigError(
                    f"a path is ranked on one process, not on {parallel.world_size}; give the recipe, or start without torchrun"
                )
            return cls(source, parallel, [load_model(source, parallel)], None)
        except BaseException:
            parallel.destroy()
            raise

    @property
    def default_length(self) -> int:
        """Tokens of a row where the user names none."""
        if self.recipe is not None and self.recipe.stages:
            return self.recipe.stages[0].sequence_length
        return min(LONGEST_DEFAULT, self.source.shape.max_sequence_length)

    def rows(
        self, tokens: int, length: int, data: Path | None, text: Sequence[str], tokenizer: str | None, seed: int
    ) -> tuple[list[MicroBatch], str]:
        """This replica's rows, and what the user calls their text."""
        from megatron_elastic.corpus.info import open_data
        from megatron_elastic.errors import ConfigError
        from megatron_elastic.export.prompts import find_tokenizer
        from megatron_elastic.export.texts import read_text
        from megatron_elastic.importance.text import rows_of_data, rows_of_documents

        vocab_size = self.source.shape.vocab_size
        if text:
            if self.parallel.world_size > 1:
                raise ConfigError(f"--text is for one process, not for {self.parallel.world_size}; write it with `data` and give --data")
            words, share = find_tokenizer(self.source, tokenizer), max(2, tokens // len(text))
            texts = [read_text(name, words, vocab_size=vocab_size, limit=share) for name in text]
            return rows_of_documents((ids for one in texts for ids in one.documents), length), ", ".join(text)
        if data is None and (self.recipe is None or self.recipe.data is None):
            raise ConfigError("there is no text to rank on; give --data DIR or --text FILE")
        directory = str(data) if data is not None or self.recipe is None or self.recipe.data is None else self.recipe.data.path
        cache = None if self.recipe is None else Path(self.recipe.run_dir) / "data_cache"
        info = open_data(directory, vocab_size)
        return rows_of_data(info, tokens, length, self.parallel, seed=seed, cache=cache), directory

    def rank(
        self, rows: list[MicroBatch], criterion: str, experts: str, depth_tokens: int, seed: int
    ) -> tuple[Collected, DepthOrder | None]:
        """Widths and experts, and the order of layers unless no tokens are given for it."""
        from megatron_elastic.importance.collect import collect
        from megatron_elastic.importance.depth import depth_order
        from megatron_elastic.importance.text import first_rows

        shape, parallel = self.source.shape, self.parallel
        found = self._with_progress(
            "rows",
            lambda progress: collect(self.parts, shape, parallel, rows, criterion=criterion, experts=experts, seed=seed, progress=progress),
        )
        if depth_tokens == 0 or shape.num_layers == 1:
            return found, None
        few = first_rows(rows, depth_tokens, parallel)
        return found, self._with_progress("layers", lambda progress: depth_order(self.parts, shape, parallel, few, progress=progress))

    def _with_progress(self, title: str, work: Callable[[Callable[[int, int], None] | None], Any]) -> Any:
        from rich.progress import MofNCompleteColumn

        from megatron_elastic.cli.progress import progress_bar

        if not self.parallel.is_main:
            return work(None)
        with progress_bar(title, MofNCompleteColumn()) as progress:
            return work(progress)


def _parent(recipe: Recipe) -> Path:
    """The checkpoint of a recipe's parent: the end of the stage that trains it, else the recipe's `parent`. Raises CheckpointError or ConfigError."""
    from megatron_elastic.errors import CheckpointError, ConfigError

    trained = [stage.name for stage in recipe.stages if not stage.elastic]
    if trained:
        path = Path(recipe.run_dir) / "checkpoints" / f"stage-{trained[-1]}"
        if not path.is_dir():
            raise CheckpointError(
                f"the parent's checkpoint {path} is not there; first train it: megatron-elastic train RECIPE --stage {trained[-1]}"
            )
        return path
    if recipe.parent is None:
        raise ConfigError("the recipe has no parent to rank; set parent: PATH or add a stage with elastic: false")
    return Path(recipe.parent)


def _load(source: Source, recipe: Recipe, parallel: ParallelContext) -> list[Any]:
    """This rank's parts of a recipe's parent."""
    from megatron_elastic.checkpoint import load_checkpoint
    from megatron_elastic.models.build import build_model
    from megatron_elastic.train.run import parameter_dtype

    parts = [
        build_model(recipe.model, parallel, params_dtype=parameter_dtype(recipe), part=part) for part in range(parallel.virtual_pipeline)
    ]
    load_checkpoint(source.path, model=parts, parallel=parallel, shape=recipe.model)
    return parts


def _ranking(source: Source, path: Path, found: Collected, order: DepthOrder | None, about: Mapping[str, Any]) -> Ranking:
    """The scores with where they come from."""
    from importlib.metadata import version

    from megatron_elastic import __version__
    from megatron_elastic.axes import ElasticAxis
    from megatron_elastic.importance.ranking import Ranking, fingerprint_of

    scores, criteria, extra = dict(found.scores), dict(found.criteria), {}
    if order is not None:
        scores[ElasticAxis.LAYERS], criteria[ElasticAxis.LAYERS] = {None: order.scores()}, "logit_mse"
        extra["depth"] = {"errors": list(order.errors), "influence": list(order.influence)}
    if found.experts is not None:
        extra["expert_tokens"] = {str(layer): counts.long().tolist() for layer, counts in found.experts.tokens.items()}
    versions = {"megatron-elastic": __version__} | {name: version(name) for name in ("torch", "megatron-core")}
    model = {"path": str(path), "fingerprint": fingerprint_of(source.tensors, source.shape)}
    return Ranking(source.shape, criteria, scores, {"model": model, **about, "versions": versions, **extra})


def _write(out: Path, ranking: Ranking, found: Collected, order: DepthOrder | None) -> None:
    """The file, and on the screen a table of the axes, how experts were covered, and the order of layers."""
    from rich.console import Console
    from rich.text import Text

    from megatron_elastic.importance.ranking import write_ranking

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
        typer.echo(f"layers, first dropped first (logit error without it and those before): {steps}")
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
