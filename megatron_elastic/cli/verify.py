"""`megatron-elastic verify`: masked = sliced = the written member, read back by its own reader."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_elastic.cli.calibration import TokenizerOption
from megatron_elastic.cli.texts import HeldOutOption, IncludeOption, KeyOption
from megatron_elastic.formats import VERIFY

if TYPE_CHECKING:
    from megatron_elastic.axes import SubmodelPlan
    from megatron_elastic.export.sources import Source
    from megatron_elastic.export.verify import Agreement

VERIFY_FILE = "verify.json"
TOKENS_DEFAULT = 8192
"""Tokens of text that are scored where no option says otherwise."""
LONGEST_DEFAULT = 256
"""Tokens of a window, where the model takes as many and no option says otherwise."""
LONGEST_COMPARED = 64
"""Tokens of the sequences that logits are compared on."""


def command(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A run, one of its checkpoints, or a Hugging Face directory with elastic.json.")
    ],
    members: Annotated[
        Path | None, typer.Option(help="Where `extract` wrote the members; default: extracted to a temporary directory, in both formats.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="A text or JSONL file or a directory: also compare perplexities.", metavar="FILE|DIR")
    ] = None,
    data: HeldOutOption = None,
    tokens: Annotated[int | None, typer.Option(help=f"Score at most this many tokens; default: {TOKENS_DEFAULT}.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help=f"Tokens a window sees; default: {LONGEST_DEFAULT}, or as many as the model takes.")
    ] = None,
    tokenizer: TokenizerOption = None,
    include: IncludeOption = None,
    key: KeyOption = None,
) -> None:
    """Check every member of a family: its logits masked and sliced, against its own model as it was written and read back.

    Megatron checkpoints are read by this package, Hugging Face directories by transformers, without remote code. Exits with an error when
    any two logits differ by more than 1e-4 (times the largest logit, where that is above 1). A member stored in a shorter type is compared with
    the family's weights rounded to it, one written with --homogenise with the wider member that it is. Writes verify.json into a run.

    \b
    Examples:
      megatron-elastic verify runs/demo
      megatron-elastic verify runs/demo --members runs/demo/members --data runs/demo/data
    """
    from megatron_elastic.cli.texts import read_texts
    from megatron_elastic.errors import CheckpointError, ConfigError
    from megatron_elastic.export.evaluate import check_sequence_length
    from megatron_elastic.export.sources import choose_plans, open_source

    if text is not None and data is not None:
        raise ConfigError("--text and --data exclude each other; give one")
    of_text = {"--tokens": tokens, "--sequence-length": sequence_length}
    if (unused := [name for name, value in of_text.items() if value is not None]) and text is None and data is None:
        raise ConfigError(f"{' and '.join(unused)}: there is no text to score; add --text or --data, or leave it out")
    source = open_source(path)
    plans = choose_plans(source.plans, None, path)
    length = min(LONGEST_DEFAULT, source.shape.max_sequence_length) if sequence_length is None else sequence_length
    check_sequence_length(length, source.shape)
    limit = TOKENS_DEFAULT if tokens is None else tokens
    texts = read_texts(source, () if text is None else (text,), data, tokens=limit, tokenizer=tokenizer, include=include, key=key)
    found = list(_verify(source, plans, members, [ids for one in texts for ids in one.documents], length))
    for line in dict.fromkeys(f"{name}: {note}" for name, agreement in found for note in agreement.notes):
        typer.echo(line)
    _print(found)
    if (path / "checkpoints").is_dir():
        write_agreements(path / VERIFY_FILE, source.path.name, {name: [one for of, one in found if of == name] for name in plans})
    failed = [
        f"{name} ({one.reader}): logits differ by {_worst(one):.1e}, {one.allowed:.1e} is allowed" for name, one in found if not one.holds
    ]
    if failed:
        raise CheckpointError(f"{', '.join(failed)}; the member is not the family's, extract it again")


def write_agreements(file: Path, checkpoint: str, agreements: Mapping[str, Sequence[Agreement]]) -> None:
    """Write verify.json: budget -> what was measured with each reader, and the name of the checkpoint it was measured on."""
    budgets = {
        name: [{**asdict(one), "allowed": one.allowed, "holds": one.holds} for one in readers] for name, readers in agreements.items()
    }
    content = {**VERIFY.stamp, "checkpoint": checkpoint, "budgets": budgets}
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _worst(agreement: Agreement) -> float:
    """The larger difference of the two; what is not a number is larger than any."""
    return max(agreement.masked_sliced, agreement.masked_extracted, key=lambda value: math.inf if math.isnan(value) else value)


def _verify(
    source: Source, plans: Mapping[str, SubmodelPlan], members: Path | None, documents: Sequence[Any], sequence_length: int
) -> Iterator[tuple[str, Agreement]]:
    """(budget, agreement) for every written model."""
    import torch

    from megatron_elastic.export.verify import Verifier, as_written
    from megatron_elastic.parallel import ParallelContext

    if members is not None:
        for name, plan in plans.items():
            as_written(source, plan, members / name)  # says what is wrong with the last one before the first is computed
    length = min(LONGEST_COMPARED, source.shape.max_sequence_length)
    ids = torch.randint(0, source.shape.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    parallel = ParallelContext.initialize()
    try:
        verifier = Verifier(source, parallel, ids, documents, sequence_length)
        for name, plan in plans.items():
            if members is not None:
                yield name, verifier.check(plan, members / name)
                continue
            with tempfile.TemporaryDirectory() as scratch:
                for member in _written(source, name, plan, Path(scratch)):
                    yield name, verifier.check(plan, member)
    finally:
        parallel.destroy()


def _written(source: Source, name: str, plan: SubmodelPlan, scratch: Path) -> Iterator[Path]:
    """The member as a megatron checkpoint, and as a Hugging Face directory where a config can say its shape and transformers is there."""
    from importlib.util import find_spec

    from megatron_elastic.errors import UnsupportedError
    from megatron_elastic.export.sources import family_to_write
    from megatron_elastic.export.write import Options, write_member
    from megatron_elastic.space import resize

    write_member(source, plan, scratch / "megatron", Options(), budget=name)
    yield scratch / "megatron"
    try:
        family_to_write(source, resize(source.shape, plan))
    except UnsupportedError as error:
        typer.echo(f"{name}: not read by transformers: {error.problems[0]}")
        return
    if find_spec("transformers") is None:
        typer.echo(f"{name}: not read by transformers, which is not installed; install megatron-elastic[hf]")
        return
    write_member(source, plan, scratch / "hf", Options(hugging_face=True), budget=name)
    yield scratch / "hf"


def _print(found: Sequence[tuple[str, Agreement]]) -> None:
    from rich.table import Table

    from megatron_elastic.cli.show import print_table

    table = Table(box=None, pad_edge=False)
    table.add_column("budget", no_wrap=True)
    table.add_column("read by", no_wrap=True)
    for title in ("masked-\nsliced", "masked-\nextracted", "allowed", "perplexity", "extracted", "verdict"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, agreement in found:
        losses = [f"{math.exp(loss):.6g}" if loss is not None else "-" for loss in (agreement.loss, agreement.extracted_loss)]
        differences = [f"{value:.1e}" for value in (agreement.masked_sliced, agreement.masked_extracted, agreement.allowed)]
        table.add_row(name, agreement.reader, *differences, *losses, "pass" if agreement.holds else "FAIL")
    print_table(table)
