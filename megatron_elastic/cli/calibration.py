"""What commands that look at a model with text share: the options that choose the text, the model loaded on its layout, and the scores as a ranking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from megatron_elastic.export.sources import Source
    from megatron_elastic.importance.collect import Collected
    from megatron_elastic.importance.depth import DepthOrder
    from megatron_elastic.importance.ranking import Ranking
    from megatron_elastic.parallel import ParallelContext
    from megatron_elastic.preemption import StopSignal
    from megatron_elastic.recipe import Recipe
    from megatron_elastic.train.data import MicroBatch

LONGEST_DEFAULT = 2048
"""Tokens of a row where none are asked for, no recipe says, and the model takes more."""
TOKENS_DEFAULT = 65536
"""Tokens of text where none are asked for."""
DataOption = Annotated[Path | None, typer.Option(help="A data directory: its training split.", metavar="DIR")]
FilesOption = Annotated[
    list[str] | None, typer.Option(help="A text or JSONL file, a directory of them, or 'stdlib'; may be repeated.", metavar="FILE|DIR")
]
TokenizerOption = Annotated[str | None, typer.Option(help="For --text: 'byte' or a tokenizer; default: the model's.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The options that choose the text. tokens: of it; sequence_length: of a row, None: as `Job.default_length` says.

    data: a data directory; text: files; None and (): the recipe's data. tokenizer: of `text`. seed: of the order of data, and of random scores.
    """

    tokens: int = TOKENS_DEFAULT
    sequence_length: int | None = None
    data: Path | None = None
    text: Sequence[str] = ()
    tokenizer: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        from megatron_elastic.errors import ConfigError

        if self.tokens < 2:
            raise ConfigError(f"--tokens {self.tokens} must be at least 2")
        if self.data is not None and self.text:
            raise ConfigError("give one of --data and --text")
        if self.tokenizer is not None and not self.text:
            raise ConfigError(f"--tokenizer {self.tokenizer!r} is for --text; leave it out")


@dataclass(frozen=True, slots=True)
class Ranked:
    """A ranking, and what it is made of: `found` of widths and experts, `order` of layers (None: not asked for)."""

    ranking: Ranking
    found: Collected
    order: DepthOrder | None


class Job:
    """A model to rank, loaded, and where its text may come from. recipe: None for a PATH, which is ranked on one process.

    stop: what may tell any of its processes to stop.
    """

    def __init__(
        self, path: Path, source: Source, parallel: ParallelContext, parts: Sequence[Any], recipe: Recipe | None, stop: StopSignal
    ) -> None:
        self.path, self.source, self.parallel, self.parts, self.recipe = path, source, parallel, parts, recipe
        self._stop = stop

    @classmethod
    def of(cls, path: Path, overrides: Sequence[str], stop: StopSignal) -> Job:
        """The parent of a recipe on the processes and the layout it asks for, or the model at a path on one process."""
        from megatron_elastic.config import load_recipe
        from megatron_elastic.errors import ConfigError
        from megatron_elastic.export.load import load_model
        from megatron_elastic.export.sources import open_source
        from megatron_elastic.parallel import ParallelContext
        from megatron_elastic.train.loop import start_parallel
        from megatron_elastic.train.run import parent_checkpoint

        if path.is_file() and path.suffix in (".yaml", ".yml"):
            recipe = load_recipe(path, overrides)
            source = open_source(parent_checkpoint(recipe))
            parallel = start_parallel(recipe)
            try:
                return cls(path, source, parallel, _load(source, recipe, parallel), recipe, stop)
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
            return cls(path, source, parallel, [load_model(source, parallel)], None, stop)
        except BaseException:
            parallel.destroy()
            raise

    @property
    def default_length(self) -> int:
        """Tokens of a row where the user names none."""
        if self.recipe is not None and self.recipe.stages:
            return self.recipe.stages[0].sequence_length
        return min(LONGEST_DEFAULT, self.source.shape.max_sequence_length)

    def rank(self, options: TextOptions, *, criterion: str, experts: str, depth_tokens: int = 0) -> Ranked | None:
        """Score widths, experts, and layers where there are tokens for them. None on all processes but the first.

        depth_tokens: tokens to order layers on, 0: no order. Raises ConfigError and DataError for text that the model cannot take, StoppedError
        on every process when one was told to stop.
        """
        from megatron_elastic.importance.collect import collect
        from megatron_elastic.importance.depth import depth_order
        from megatron_elastic.importance.text import check_length, first_rows

        shape, parallel, seed = self.source.shape, self.parallel, options.seed
        length = self.default_length if options.sequence_length is None else options.sequence_length
        check_length(length, shape.max_sequence_length, parallel)
        rows, name = self._rows(options, length)
        found = self._with_progress(
            "rows",
            lambda progress: collect(self.parts, shape, parallel, rows, criterion=criterion, experts=experts, seed=seed, progress=progress),
        )
        order = None
        if depth_tokens > 0 and shape.num_layers > 1:
            few = first_rows(rows, depth_tokens, parallel)
            order = self._with_progress("layers", lambda progress: depth_order(self.parts, shape, parallel, few, progress=progress))
        if not parallel.is_main:
            return None
        about = {"data": name, "tokens": found.tokens, "sequence_length": length, "seed": seed}
        return Ranked(_ranking(self.source, self.path, found, order, about), found, order)

    def _rows(self, options: TextOptions, length: int) -> tuple[list[MicroBatch], str]:
        """This replica's rows, and what the user calls their text."""
        from megatron_elastic.corpus.info import open_data
        from megatron_elastic.errors import ConfigError
        from megatron_elastic.export.prompts import check_data_tokenizer, find_tokenizer
        from megatron_elastic.export.texts import read_text
        from megatron_elastic.importance.text import rows_of_data, rows_of_documents

        vocab_size, data, text = self.source.shape.vocab_size, options.data, options.text
        if text:
            if self.parallel.world_size > 1:
                raise ConfigError(f"--text is for one process, not for {self.parallel.world_size}; write it with `data` and give --data")
            words, share = find_tokenizer(self.source, options.tokenizer), max(2, options.tokens // len(text))
            texts = [read_text(name, words, vocab_size=vocab_size, limit=share) for name in text]
            return rows_of_documents((ids for one in texts for ids in one.documents), length), ", ".join(text)
        if data is None and (self.recipe is None or self.recipe.data is None):
            raise ConfigError("there is no text to rank on; give --data DIR or --text FILE")
        directory = str(data) if data is not None or self.recipe is None or self.recipe.data is None else self.recipe.data.path
        cache = None if self.recipe is None else Path(self.recipe.run_dir) / "data_cache"
        info = open_data(directory, vocab_size)
        check_data_tokenizer(self.source, info)
        return rows_of_data(info, options.tokens, length, self.parallel, seed=options.seed, cache=cache), directory

    def _with_progress(self, title: str, work: Callable[[Callable[[int, int], None]], Any]) -> Any:
        """work(progress): a bar on the main rank, and on all a place to stop, since every rank reports the same progress."""
        from contextlib import nullcontext

        from rich.progress import MofNCompleteColumn

        from megatron_elastic.cli.progress import progress_bar

        with progress_bar(title, MofNCompleteColumn()) if self.parallel.is_main else nullcontext() as show:

            def progress(done: int, total: int) -> None:
                if show is not None:
                    show(done, total)
                self._stop.check(self.parallel, "nothing is written; start again")

            return work(progress)


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
        scores[ElasticAxis.LAYERS], criteria[ElasticAxis.LAYERS] = {None: order.scores()}, "kl"
        extra["depth"] = {"errors": list(order.errors), "influence": list(order.influence)}
    if found.experts is not None:
        extra["expert_tokens"] = {str(layer): counts.long().tolist() for layer, counts in found.experts.tokens.items()}
    versions = {"megatron-elastic": __version__} | {name: version(name) for name in ("torch", "megatron-core")}
    model = {"path": str(path), "fingerprint": fingerprint_of(source.tensors, source.shape)}
    return Ranking(source.shape, criteria, scores, {"model": model, **about, "versions": versions, **extra})
