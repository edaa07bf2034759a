"""`megatron-elastic verify`: masked = sliced = the extracted checkpoint read back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_elastic.formats import VERIFY

if TYPE_CHECKING:
    from megatron_elastic.export.verify import Agreement

VERIFY_FILE = "verify.json"


def command(
    source: Annotated[Path, typer.Argument(help="A run, or one of its checkpoints.")],
    members: Annotated[
        Path | None, typer.Option(help="Where `extract` wrote the members; default: extracted to a temporary directory.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A data directory: also compare held-out losses.")] = None,
    samples: Annotated[int, typer.Option(help="Held-out samples.")] = 32,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 256,
) -> None:
    """Check every member of a family: logits under its plan, masked and sliced, against its own checkpoint read back.

    Exits with an error when any two logits differ by more than 1e-4. Writes verify.json into a run.
    Example: megatron-elastic verify runs/demo --members runs/demo/members --data runs/demo/data
    """
    from megatron_elastic.checkpoint import find_model_checkpoint, open_checkpoint

    checkpoint = find_model_checkpoint(source)
    info = open_checkpoint(checkpoint)
    from megatron_elastic.errors import CheckpointError
    from megatron_elastic.export.verify import TOLERANCE, choose_plans
    from megatron_elastic.parallel import ParallelContext

    plans = choose_plans(info.plans, None, source)
    parallel = ParallelContext.initialize()
    try:
        agreements = _verify(checkpoint, plans, members, parallel, _text(data, info.shape, samples, sequence_length, parallel))
    finally:
        parallel.destroy()
    _print(agreements)
    if (source / "checkpoints").is_dir():
        write_agreements(source / VERIFY_FILE, checkpoint.name, agreements)
    failed = [name for name, agreement in agreements.items() if not agreement.holds]
    if failed:
        raise CheckpointError(
            f"{', '.join(failed)}: logits differ by more than {TOLERANCE}; the member is not the family's, extract it again"
        )


def write_agreements(file: Path, checkpoint: str, agreements: Mapping[str, Agreement]) -> None:
    """Write verify.json: budget -> what was measured, and the name of the checkpoint it was measured on."""
    content = {**VERIFY.stamp, "checkpoint": checkpoint, "budgets": {name: asdict(found) for name, found in agreements.items()}}
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _verify(checkpoint: Path, plans: dict[str, Any], members: Path | None, parallel: Any, text: list[Any]) -> dict[str, Agreement]:
    import torch

    from megatron_elastic.checkpoint import open_checkpoint
    from megatron_elastic.export.verify import Verifier, write_submodel

    vocab = open_checkpoint(checkpoint).shape.vocab_size
    tokens = torch.randint(0, vocab, (2, 64), generator=torch.Generator().manual_seed(0))
    verifier = Verifier(checkpoint, parallel, tokens, text)
    with tempfile.TemporaryDirectory() as scratch:
        results = {}
        for name, plan in plans.items():
            member = Path(scratch) / name if members is None else members / name
            if members is None:
                write_submodel(checkpoint, plan, member)
            results[name] = verifier.check(plan, member)
        return results


def _text(data: Path | None, shape: Any, samples: int, sequence_length: int, parallel: Any) -> list[Any]:
    """Held-out microbatches, or none without `--data`."""
    if data is None:
        return []
    from megatron_elastic.train.data import build_datasets, fixed_batches, open_data

    info = open_data(data, shape.vocab_size)
    with tempfile.TemporaryDirectory() as cache:
        datasets = build_datasets(
            info,
            sequence_length=sequence_length,
            train_samples=1,
            valid_samples=samples,
            seed=1234,
            cache_dir=Path(cache),
            parallel=parallel,
        )
        return fixed_batches(datasets.valid, samples, micro_batch_size=4, data_rank=0, data_size=1)


def _print(agreements: dict[str, Agreement]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("budget", box=None, pad_edge=False)
    for title in ("masked-sliced", "masked-extracted", "loss", "loss extracted"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, agreement in agreements.items():
        losses = [f"{loss:.4f}" if loss is not None else "-" for loss in (agreement.loss, agreement.extracted_loss)]
        table.add_row(name, f"{agreement.masked_sliced:.1e}", f"{agreement.masked_extracted:.1e}", *losses)
    Console().print(table)
