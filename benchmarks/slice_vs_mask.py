"""What elasticity costs: a half-width plan in slice mode, in mask mode and as a late soft decision, against the extracted model alone; the
full budget against the parent that was never made elastic.

Each variant is a forward and a backward through megatron-core's DDP, as in training: gradients end in `main_grad`. All ways to run
the plan must give the same logits before anything is timed. Ratios only: absolute times of a shared machine mean nothing.
The last line of the output is one JSON object.

Run: python benchmarks/slice_vs_mask.py [--shape recipes/demo_hybrid.yaml] [--pairs 15] [--tokens 1024]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.command import outcome
from benchmarks.paired import Seconds, Spread, Timed, paired, take_turns
from megatron_elastic import __version__
from megatron_elastic.axes import ElasticSpace, SubmodelPlan
from megatron_elastic.config import load_recipe, to_plain
from megatron_elastic.cost import flops_per_token, total_params, widths_of
from megatron_elastic.errors import ConfigError
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.preflight import check_sequence_length
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import parent_plan, resize

FORMAT_VERSION = 1
TOLERANCE = 1e-4
"""Largest relative difference of logits (norm of the difference over the norm) between two ways to run the plan, fp32."""
BYTES_PER_PARAMETER = 40
"""Of the parent, in fp32: weights and gradients, as much again for the plain parent and for the extracted model at its widest, and the copies it is cut from."""
WARM_UP = 2
VARIANTS = ("slice", "mask", "late_soft", "extracted", "full", "parent")
PAIRS = (
    *((name, "extracted") for name in ("slice", "mask", "late_soft", "full", "parent")),
    ("slice", "mask"),
    ("late_soft", "slice"),
    ("full", "parent"),
)
"""The ratios that are reported: (variant, base)."""
DOUBT = 1e-6
"""Probability of all choices but one in a late soft decision, which is then the hard plan to rounding."""
THRESHOLD = 1e-3
"""Choices less probable than this are not computed."""


@dataclass(frozen=True, slots=True)
class Options:
    """shape: a recipe with a `model` and an `elastic` block; pairs: rounds in which every variant runs once; tokens: of one sequence."""

    shape: Path
    pairs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute: a model in megatron's DDP, and what decides how it runs (a plan, None, or what makes a decision each time)."""

    chunk: Any
    handle: Any = None
    plan: Any = None
    mode: str = "slice"

    def running(self) -> AbstractContextManager[None]:
        """The context in which forwards run this variant."""
        if self.handle is None:
            return nullcontext()
        return self.handle.use(self.plan() if callable(self.plan) else self.plan, self.mode)


def half_width_plan(space: ElasticSpace) -> SubmodelPlan:
    """Every elastic axis at the choice nearest to half of the parent's, the narrower of two that are equally near."""
    return space.plan({spec.axis: min(spec.choices, key=lambda n: (abs(2 * n - spec.parent), n)) for spec in space.axes})


def late_soft_decision(space: ElasticSpace, plan: SubmodelPlan, num_layers: int) -> Any:
    """What the router gives at the end of its learning: almost all probability on the choices of `plan`, differentiable."""
    from megatron_elastic.elastic.decision import soft_decision

    probabilities = {}
    for spec in space.axes:
        sure = torch.tensor([[float(choice == width) for choice in spec.choices] for width in space.choices_of(plan, spec.axis)])
        probabilities[spec.axis] = (sure * (1 - DOUBT) + DOUBT / len(spec.choices)).requires_grad_()
    return soft_decision(space, probabilities, num_layers, THRESHOLD)


class Comparison:
    """A family and the extracted model of its half-width plan, ready to be run side by side on one sequence of random tokens."""

    def __init__(self, shape: ModelShape, space: ElasticSpace, parallel: ParallelContext, tokens: int) -> None:
        from megatron_elastic.elastic.attach import elasticize
        from megatron_elastic.export.extract import extract
        from megatron_elastic.models.build import build_model
        from megatron_elastic.models.weights import gather_tensors, scatter_tensors
        from megatron_elastic.testing.experts import stack_experts, unstack_experts
        from megatron_elastic.testing.tiny import randomize_

        self.shape, self.plan, self.tokens = shape, half_width_plan(space), tokens
        family = build_model(shape, parallel)
        randomize_(family)
        small = build_model(resize(shape, self.plan), parallel)
        scatter_tensors(small, unstack_experts(dict(extract(stack_experts(gather_tensors(family)).items(), shape, space, self.plan))))
        handle = elasticize(family, space, parallel, shape)
        parent = build_model(shape, parallel)
        randomize_(parent)
        whole, alone = _in_ddp(family), _in_ddp(small)
        self.space = space
        self.variants = {
            "slice": Variant(whole, handle, self.plan, "slice"),
            "mask": Variant(whole, handle, self.plan, "mask"),
            "late_soft": Variant(whole, handle, self._late_soft),
            "extracted": Variant(alone),
            "full": Variant(whole, handle),
            "parent": Variant(_in_ddp(parent)),
        }
        self._text = torch.randint(0, shape.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
        self._positions = torch.arange(tokens)[None]

    def _late_soft(self) -> Any:
        return late_soft_decision(self.space, self.plan, self.shape.num_layers)

    def loss(self, name: str) -> torch.Tensor:
        """Mean cross-entropy of one forward."""
        variant = self.variants[name]
        with variant.running():
            return variant.chunk(self._text[:, :-1], self._positions, None, labels=self._text[:, 1:]).mean()

    def timed(self, name: str) -> Timed:
        """One forward and backward; gradients are zeroed before it."""
        return Timed(run=lambda: self.loss(name).backward(), prepare=self.variants[name].chunk.zero_grad_buffer)

    @torch.no_grad()
    def largest_difference(self) -> float:
        """Largest relative difference of the plan's logits in any way from the extracted model's, and of the full budget's from the parent's,
        at most `TOLERANCE`."""
        logits = {}
        for name in VARIANTS:
            with self.variants[name].running():
                logits[name] = self.variants[name].chunk(self._text[:, :-1], self._positions, None)
        bases = {"slice": "extracted", "mask": "extracted", "late_soft": "extracted", "full": "parent"}
        found = {name: float((logits[name] - logits[base]).norm() / logits[base].norm()) for name, base in bases.items()}
        for name, difference in found.items():
            assert difference <= TOLERANCE, f"the logits of {name} are {difference:.1e} from those of {bases[name]}; nothing was timed"
        return max(found.values())

    def flops(self) -> dict[str, int]:
        """Variant -> FLOPs of one forward by the cost model; mask mode computes all of the parent."""
        parent, small = (self._flops_of(plan) for plan in (None, self.plan))
        return {"slice": small, "mask": parent, "late_soft": small, "extracted": small, "full": parent, "parent": parent}

    def _flops_of(self, plan: SubmodelPlan | None) -> int:
        widths = widths_of(plan or parent_plan(self.shape), self.shape.num_layers)
        return self.tokens * int(flops_per_token(self.shape, widths, self.tokens))

    def saved_bytes(self, name: str) -> int:
        """Bytes kept for the backward: every storage that the graph of the loss holds, once and whole, parameters left out."""
        held: weakref.WeakSet[_Held] = weakref.WeakSet()

        def pack(tensor: torch.Tensor) -> _Held:
            held.add(saved := _Held(tensor))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            loss = self.loss(name)
        owned = {p.untyped_storage().data_ptr() for p in self.variants[name].chunk.parameters()}
        storages = [saved.tensor.untyped_storage() for saved in held]  # not what was saved for a result that nothing uses
        del loss
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in owned}.values())


@dataclass(eq=False)
class _Held:
    """A saved tensor that lives as long as the graph."""

    tensor: torch.Tensor


def _in_ddp(model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, config, model)


def measure(options: Options, parallel: ParallelContext) -> dict[str, Any]:
    """Build, check, time; the result is plain data, the object that is printed last."""
    recipe = load_recipe(options.shape)
    if recipe.space is None:
        raise ConfigError(f"{options.shape} has no elastic block, so no half-width plan; give a recipe that has one")
    check_sequence_length(recipe.model, options.tokens, "--tokens")
    _check_memory(recipe.model)
    comparison = Comparison(recipe.model, recipe.space, parallel, options.tokens)
    difference = comparison.largest_difference()
    variants = {name: comparison.timed(name) for name in VARIANTS}
    progress = _Progress(options.pairs)
    seconds = take_turns(variants, options.pairs, warm_up=WARM_UP, done=progress)
    return {
        "benchmark": "slice_vs_mask",
        "format_version": FORMAT_VERSION,
        "recipe": str(options.shape),
        "shape": to_plain(recipe.model),
        "plan": comparison.plan.to_dict(),
        "tokens": options.tokens,
        "pairs": options.pairs,
        "warm_up": WARM_UP,
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "largest_logit_difference": difference,
        "flops": comparison.flops(),
        "saved_bytes": {name: comparison.saved_bytes(name) for name in VARIANTS},
        "ratios": _ratios(seconds, "wall"),
        "cpu_ratios": _ratios(seconds, "cpu"),
    }


def _ratios(seconds: Mapping[str, Sequence[Seconds]], clock: str) -> dict[str, dict[str, float]]:
    times = {name: [getattr(taken, clock) for taken in runs] for name, runs in seconds.items()}
    return {f"{name}/{base}": asdict(paired(times[name], times[base])) for name, base in PAIRS}


def _check_memory(shape: ModelShape) -> None:
    """Refuse a model that does not fit: the system would end the process without a word."""
    needed = BYTES_PER_PARAMETER * total_params(shape, widths_of(parent_plan(shape), shape.num_layers))
    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(f"--shape: the model needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free; give a smaller one")


class _Progress:
    """A line on stderr after each round, so that the output stays clean."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._start = rounds, time.monotonic()
        print(f"warm-up, then {rounds} rounds of {', '.join(VARIANTS)}", file=sys.stderr)

    def __call__(self, done: int) -> None:
        each = (time.monotonic() - self._start) / (done + WARM_UP)
        print(f"round {done}/{self._rounds}, {each * (self._rounds - done):.0f} s left", file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "megatron-core")}
    return {"python": platform.python_version(), "megatron-elastic": __version__, **packages}


def print_report(result: dict[str, Any]) -> None:
    """The plan and a table with one row a variant for people; then one line of JSON with everything."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("variant", no_wrap=True)
    for title in (
        "time / extracted (quartiles)",
        "CPU time / extracted (quartiles)",
        "forward GFLOPs",
        "FLOPs / extracted",
        "saved MiB",
        "saved / extracted",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    flops, saved = result["flops"], result["saved_bytes"]
    for name in VARIANTS:
        times = ["1" if name == "extracted" else _spread(result, clock, f"{name}/extracted") for clock in ("ratios", "cpu_ratios")]
        sizes = (f"{flops[name] / 1e9:.2f}", f"{flops[name] / flops['extracted']:.2f}")
        memory = (f"{saved[name] / 2**20:.1f}", f"{saved[name] / saved['extracted']:.2f}")
        table.add_row(name, *times, *sizes, *memory)
    parent = result["shape"]
    widths = ", ".join(f"{axis} {width}" for axis, width in result["plan"]["widths"].items())
    print(
        f"{result['recipe']}: {parent['layer_pattern']}, hidden {parent['hidden_size']}; the plan: {widths}, dropped layers {result['plan']['dropped_layers']}"
    )
    print(
        f"{result['tokens']} tokens, {result['pairs']} pairs, threads: {result['threads']}; logits agree to {result['largest_logit_difference']:.0e}\n"
    )
    Console(width=140).print(table)
    print()
    for pair in ("slice/mask", "late_soft/slice", "full/parent"):
        print(f"{pair}: {_spread(result, 'ratios', pair)}, CPU time {_spread(result, 'cpu_ratios', pair)}")
    print()
    print(json.dumps(result))


def _spread(result: dict[str, Any], clock: str, pair: str) -> str:
    return str(Spread(**result[clock][pair]))


def parse(arguments: Sequence[str] | None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=Path, default=Path(__file__).with_suffix(".yaml"), help="a recipe with an elastic block (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=15, help="rounds, at least 2 (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the one sequence (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    if parsed.pairs < 2:
        parser.error(f"--pairs {parsed.pairs}: quartiles need at least 2")
    return Options(parsed.shape, parsed.pairs, parsed.tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse(arguments)

    def on_one_process() -> dict[str, Any]:
        parallel = ParallelContext.initialize()
        try:
            return measure(options, parallel)
        finally:
            parallel.destroy()

    return outcome(on_one_process, print_report)


if __name__ == "__main__":
    sys.exit(main())
