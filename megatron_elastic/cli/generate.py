"""`megatron-elastic generate`: continue a text with the members of a family, to look at them by eye."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from megatron_elastic.axes import SubmodelPlan
    from megatron_elastic.corpus.tokenizer import Tokenizer
    from megatron_elastic.export.generate import Continuation, GenerateOptions
    from megatron_elastic.export.sampling import Sampling
    from megatron_elastic.export.sources import Source


def command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run, a checkpoint, or a Hugging Face directory.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file with a prompt on every line, instead.")] = None,
    budget: Annotated[str | None, typer.Option(help="Member of the family; default: the whole model.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan of the space as JSON, instead of a budget.")] = None,
    all_budgets: Annotated[bool, typer.Option("--all-budgets", help="Every budget, one under the other.")] = False,
    tokens: Annotated[int, typer.Option(help="Longest continuation; it stops where the document ends.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="Draw tokens at this temperature; default: take the most probable.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among this many of the most probable tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the fewest tokens that hold this probability together.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws; default: 0.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="'byte', a tokenizer.json, or a directory with one; default: the model's.")] = None,
    eod: Annotated[str | None, typer.Option(help="Word that ends a document, with --tokenizer; default: the tokenizer's own.")] = None,
) -> None:
    """Continue a text with a model, or with members of its family, and print their loss per token of the prompt.

    Every token is computed from the whole text before it (there is no cache), so this is for short texts.

    \b
    Examples:
      megatron-elastic generate runs/demo --prompt "def main(" --all-budgets
      megatron-elastic generate runs/demo/members/small --prompt "import os" --temperature 0.8 --top-p 0.95 --seed 1
    """
    from megatron_elastic.errors import ConfigError
    from megatron_elastic.export.prompts import encode_prompts, find_tokenizer, read_prompts
    from megatron_elastic.export.sources import open_source

    if tokens < 1:
        raise ConfigError(f"--tokens {tokens} must be at least 1")
    if (prompt is None) == (prompts is None):
        raise ConfigError("give one of --prompt TEXT and --prompts FILE")
    source = open_source(path)
    words = find_tokenizer(source, tokenizer, eod)
    texts = [prompt] if prompt is not None else read_prompts(prompts) if prompts is not None else []
    encoded = encode_prompts(texts, words, tokens, source.shape.max_sequence_length)
    from megatron_elastic.export.generate import GenerateOptions

    options = GenerateOptions(
        tokens=tokens,
        end=words.eod,
        vocab_size=source.shape.vocab_size,
        drawable=words.vocab_size,
        sampling=_sampling(temperature, top_k, top_p, seed),
        seed=seed or 0,
    )
    plans = _plans(source, path, budget, plan, all_budgets=all_budgets)
    for number, (text, found) in enumerate(zip(texts, _continue(source, encoded, plans, options), strict=True)):
        _print(text, encoded[number], found, words)


def _sampling(temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None) -> Sampling | None:
    """How tokens are drawn; None when no option asks for draws."""
    from megatron_elastic.errors import ConfigError
    from megatron_elastic.export.sampling import Sampling

    if temperature is None and top_k is None and top_p is None:
        if seed is not None:
            raise ConfigError(f"--seed {seed} draws nothing by itself; give --temperature, --top-k or --top-p too")
        return None
    return Sampling(temperature=1.0 if temperature is None else temperature, top_k=top_k, top_p=top_p)


def _plans(source: Source, path: Path, budget: str | None, plan: Path | None, *, all_budgets: bool) -> dict[str, SubmodelPlan | None]:
    """Name -> plan of what is asked for; None: the model as it is."""
    from megatron_elastic.cli.extract import read_plan
    from megatron_elastic.errors import CheckpointError, PlanError
    from megatron_elastic.export.sources import choose_plans, describe

    given = [name for name, value in (("--budget", budget), ("--plan", plan), ("--all-budgets", all_budgets or None)) if value is not None]
    if not given:
        return {"model": None}
    if len(given) > 1:
        raise PlanError(f"{' and '.join(given)} exclude each other; give one")
    if source.space is None:
        raise CheckpointError(f"{describe(source)} holds no family, so there is nothing for {given[0]}; leave it out")
    if plan is None:
        return dict(choose_plans(source.plans, budget, path))
    chosen = read_plan(plan)
    source.space.check(chosen)
    return {"plan": chosen}


def _continue(
    source: Source, encoded: Sequence[Sequence[int]], plans: Mapping[str, SubmodelPlan | None], options: GenerateOptions
) -> Iterator[dict[str, Continuation]]:
    """Name -> continuation, for one prompt after the other."""
    from megatron_elastic.elastic.attach import elasticize
    from megatron_elastic.export.generate import generate
    from megatron_elastic.export.load import load_model
    from megatron_elastic.parallel import ParallelContext

    parallel = ParallelContext.initialize()
    try:
        model = load_model(source, parallel)
        handle = None if source.space is None else elasticize(model, source.space, parallel, source.shape)
        for ids in encoded:
            found = {}
            for name, plan in plans.items():
                with nullcontext() if handle is None else handle.use(plan):
                    found[name] = generate(model, ids, options)
            yield found
    finally:
        parallel.destroy()


def _print(prompt: str, ids: Sequence[int], found: Mapping[str, Continuation], tokenizer: Tokenizer) -> None:
    """A panel: the prompt, then a row for each model."""
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("budget", no_wrap=True)
    table.add_column("loss of the prompt", justify="right", no_wrap=True)
    table.add_column("continuation")
    for name, continuation in found.items():
        loss = "-" if continuation.prompt_loss is None else f"{continuation.prompt_loss:.3f}"
        table.add_row(Text(name), loss, _text(ids, continuation, tokenizer))
    Console(highlight=False).print(Panel(Group(Text(printable(prompt), style="dim"), "", table)))


def _text(prompt: Sequence[int], continuation: Continuation, tokenizer: Tokenizer) -> Text:
    """The text of a continuation. It is cut from that of the whole: a tokenizer may write the same token otherwise at the start of a text."""
    import numpy as np
    from rich.text import Text

    before, whole = (tokenizer.decode(np.asarray(ids, dtype=np.int64)) for ids in (prompt, [*prompt, *continuation.ids]))
    text = Text(printable(whole[len(before) :]))
    return text.append(" <end>", style="dim") if continuation.ended else text


def printable(text: str) -> str:
    """`text` with every character that a terminal could take for a command written as its escape; lines stay lines."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)
