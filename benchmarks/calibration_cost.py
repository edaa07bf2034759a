"""What it costs to look at a model while it reads: calibration by each criterion against a plain forward over the same rows.

Every variant reads the same rows of random tokens in the same model. The plain forward is `collect`'s own, without a hook: it stops at the
final hidden states, so that no logits hide what observing costs. `energy`, `activation`, `minitron` and `taylor` score widths alone, `reap` experts
alone, `rank` is the default of `megatron-elastic rank` (energy and reap together). Variants take turns; ratios are paired.
The last line of the output is one JSON object.

Examples:
  python -m benchmarks.calibration_cost
  python -m benchmarks.calibration_cost --shape recipes/demo_dense.yaml --pairs 30
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import outcome
from benchmarks.paired import Seconds, Spread, Timed, paired, take_turns
from megatron_elastic import __version__
from megatron_elastic.config import load_recipe, to_plain
from megatron_elastic.errors import ConfigError
from megatron_elastic.importance.collect import collect
from megatron_elastic.importance.criteria import CriterionName, ExpertCriterion
from megatron_elastic.models.build import build_model
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.preflight import check_sequence_length
from megatron_elastic.shape import ModelShape
from megatron_elastic.train.data import MicroBatch, pack_samples
from megatron_elastic.train.schedule import map_microbatches

FORMAT_VERSION = 1
PLAIN = "forward"
MOST = 1.25
"""What is aimed at for the criteria that run forward only, and for `rank` by default: `energy` and `reap` together."""
AIMED = ("energy", "activation", "reap", "rank")
WARM_UP = 1
VARIANTS: Mapping[str, tuple[CriterionName, ExpertCriterion]] = {
    "energy": (CriterionName.ENERGY, ExpertCriterion.RANDOM),
    "activation": (CriterionName.ACTIVATION, ExpertCriterion.RANDOM),
    "minitron": (CriterionName.MINITRON, ExpertCriterion.RANDOM),
    "reap": (CriterionName.RANDOM, ExpertCriterion.REAP),
    "rank": (CriterionName.ENERGY, ExpertCriterion.REAP),
    "taylor": (CriterionName.TAYLOR, ExpertCriterion.RANDOM),
}


@dataclass(frozen=True, slots=True)
class Options:
    """shape: a recipe; pairs: rounds; rows and tokens: of each variant in a round, and of each row."""

    shape: Path
    pairs: int
    rows: int
    tokens: int


def variants_of(shape: ModelShape) -> dict[str, tuple[CriterionName, ExpertCriterion]]:
    """The variants that a model can have: without routed experts there is nothing for `reap` to see."""
    return {name: chosen for name, chosen in VARIANTS.items() if shape.has("moe") or name not in ("reap", "rank")}


def random_rows(shape: ModelShape, count: int, tokens: int) -> list[MicroBatch]:
    """Rows of uniformly drawn words."""
    drawn = torch.randint(shape.vocab_size, (count, tokens + 1), generator=torch.Generator().manual_seed(1234))
    positions = torch.arange(tokens)
    return [
        pack_samples([{"tokens": row[:-1], "labels": row[1:], "loss_mask": torch.ones(tokens), "position_ids": positions}], number)
        for number, row in enumerate(drawn)
    ]


def measure(options: Options) -> dict[str, Any]:
    """Build and time; the result is plain data, the object that is printed last."""
    recipe, parallel = load_recipe(options.shape), ParallelContext.initialize()
    shape = recipe.model
    try:
        check_sequence_length(shape, options.tokens, "--tokens")
        if options.tokens > shape.max_sequence_length:
            raise ConfigError(f"--tokens {options.tokens} is above model.max_sequence_length {shape.max_sequence_length}")
        model, rows = build_model(shape, parallel).eval(), random_rows(shape, options.rows, options.tokens)
        names = variants_of(shape)
        timed = {PLAIN: Timed(lambda: _forward(model, rows, parallel), lambda: None)}
        timed |= {
            name: Timed(lambda chosen=chosen: collect([model], shape, parallel, rows, criterion=chosen[0], experts=chosen[1]), lambda: None)
            for name, chosen in names.items()
        }
        seconds = take_turns(timed, options.pairs, warm_up=WARM_UP, done=lambda done: _say(f"round {done}/{options.pairs}"))
    finally:
        parallel.destroy()
    return {
        "benchmark": "calibration_cost",
        "format_version": FORMAT_VERSION,
        "recipe": str(options.shape),
        "shape": to_plain(shape),
        "rows": options.rows,
        "tokens": options.tokens,
        "pairs": options.pairs,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "megatron-elastic": __version__, "torch": version("torch")},
        "ratios": _ratios(seconds, "wall"),
        "cpu_ratios": _ratios(seconds, "cpu"),
        "aim": {"variants": [name for name in AIMED if name in names], "most": MOST},
    }


@torch.no_grad()
def _forward(model: Any, rows: Sequence[MicroBatch], parallel: ParallelContext) -> None:
    for row in rows:
        map_microbatches([model], parallel, [row], lambda batch, hidden: None)


def _ratios(seconds: Mapping[str, Sequence[Seconds]], clock: str) -> dict[str, dict[str, float]]:
    times = {name: [getattr(taken, clock) for taken in runs] for name, runs in seconds.items()}
    return {name: asdict(paired(times[name], times[PLAIN])) for name in times if name != PLAIN}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_report(result: Mapping[str, Any]) -> None:
    """A line a variant, what is missed, and the JSON line."""
    print(f"{result['recipe']}: {result['rows']} rows of {result['tokens']} tokens, {result['pairs']} pairs, threads: {result['threads']}")
    print(f"{'criterion':12}{'time / forward (quartiles)':>30}{'CPU time / forward (quartiles)':>34}")
    for name in result["ratios"]:
        print(f"{name:12}{Spread(**result['ratios'][name])!s:>30}{Spread(**result['cpu_ratios'][name])!s:>34}")
    for name in result["aim"]["variants"]:
        if result["ratios"][name]["median"] > result["aim"]["most"]:
            print(f"missed: {name} costs more than {result['aim']['most']} of a forward")
    print(json.dumps(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=Path, default=Path(__file__).with_name("slice_vs_mask.yaml"), help="a recipe (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=15, help="rounds, at least 2 (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="rows that each variant reads in a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.pairs < 2:
        parser.error(f"--pairs {given.pairs}: quartiles need at least 2")
    return outcome(lambda: measure(Options(given.shape, given.pairs, given.rows, given.tokens)), print_report)


if __name__ == "__main__":
    sys.exit(main())
