"""Whether every rank gets the same share of work at every budget: live experts, routed tokens and FLOPs for each rank, counted and not timed.

Beside the package's grouped prefixes stands the plain prefix: a sub-model of width n keeps the first n components of the whole axis, so
that the last ranks, which hold the last components, idle. Imbalance is max/mean over the ranks; where layers differ, the sum over layers of
the busiest rank's work over the sum of the mean, since every layer waits for its busiest rank. 1 is perfect; misses are listed.

Expert parallelism (EP): live experts follow from the plan. Tokens are those that the elastic routers send, from two sources:
  drawn  hidden states drawn independently, each token another; the parent's expert bias is balanced on other draws first, by the rule that
         balances parents in training, and then frozen (a router without an expert bias stays as it was initialised)
  text   bytes of Python's standard library through the family as it was initialised: nothing has balanced this router, and nearly a
         third of the bytes are spaces, which go to nearly the same experts; its own imbalance is the parent's row
Tensor parallelism (TP): torch's FLOP counter on a forward of each rank's shard in slice mode, in a world of simulated ranks; the counts of all
ranks must add up to the cost model's. The plain prefix is computed from the cost model.
The last line of the output is one JSON object.

Examples:
  python benchmarks/balance.py
  python benchmarks/balance.py --shape recipes/demo_moe.yaml --tokens 8192
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import outcome
from benchmarks.shares import BAR, SCHEMES, Balance, expert_flops, expert_layers, live_experts, per_rank, prefix_flops, spaces_of
from megatron_elastic import __version__
from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.config import load_recipe, to_plain
from megatron_elastic.corpus.sources import STDLIB, find_files, limit_bytes
from megatron_elastic.cost import flops_per_token, widths_of
from megatron_elastic.errors import ConfigError
from megatron_elastic.layout import layer_of
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.preflight import budget_plans, check_sequence_length, recipe_cost, recipe_problems
from megatron_elastic.recipe import ParallelConfig, Recipe
from megatron_elastic.shape import ModelShape

FORMAT_VERSION = 1
RANKS = (2, 4, 8)
SOURCES = ("drawn", "text")
BALANCING_STEPS = 100
BALANCING_TOKENS = 4096
BALANCING_RATE = 1e-3
"""megatron-core's default for `moe_router_bias_update_rate`."""
SEED = 1234


@dataclass(frozen=True, slots=True)
class Options:
    """shape: a recipe with an elastic block; tokens: routed at each budget; sequence: their sequences' length, and the one FLOPs are counted for."""

    shape: Path
    tokens: int
    sequence: int


def plans_of(recipe: Recipe, space: ElasticSpace) -> dict[str, SubmodelPlan]:
    """The parent, then the plans of the recipe's budgets that are narrower."""
    budgets = budget_plans(recipe, recipe_cost(recipe))
    return {"parent": space.parent} | {name: plan for name, plan in budgets.items() if plan != space.parent}


class Routing:
    """A family with its routers, on one process; counts what they send to each expert."""

    def __init__(self, recipe: Recipe, parallel: ParallelContext, options: Options) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        from megatron_elastic.models.build import build_model
        from megatron_elastic.platform.versions import canonical_name

        self.shape, self.options, self._parallel = recipe.model, options, parallel
        self.model = build_model(recipe.model, parallel, seed=SEED).eval()
        self.routers: dict[int, Any] = {}
        for name, module in self.model.named_modules():
            layer = layer_of(canonical_name(f"{name}.weight"))
            if isinstance(module, TopKRouter) and layer is not None:
                self.routers[layer] = module
        self._text = _text(recipe.model, options)

    @torch.no_grad()
    def counts(self, source: str, space: ElasticSpace, plan: SubmodelPlan) -> dict[int, list[int]]:
        """Layer -> tokens of each expert, in the parent's numbering; layers that the plan drops are left out."""
        from megatron_elastic.elastic.attach import elasticize

        handle = elasticize(self.model, space, self._parallel, self.shape)
        try:
            with handle.use(plan):
                counts = (self._of_text if source == "text" else self._of_draws)(space, plan)
        finally:
            handle.remove()
        assert list(counts) == expert_layers(self.shape, plan), "a router was not reached"
        return {layer: count.tolist() for layer, count in counts.items()}

    @torch.no_grad()
    def balance_parent(self) -> None:
        """Move the expert biases of the parent as training does: up for experts with fewer tokens than their share, down for the others.

        The auxiliary-loss-free rule of arXiv 2408.15664 (megatron's `get_updated_expert_bias`), on draws that are not counted later.
        """
        for layer, router in self.routers.items():
            if router.expert_bias is None:
                continue
            generator = torch.Generator().manual_seed(SEED - 1 - layer)
            for _ in range(BALANCING_STEPS):
                load = self._load(router, torch.randn(BALANCING_TOKENS, 1, self.shape.hidden_size, generator=generator)).float()
                router.expert_bias.add_(torch.sign(load.mean() - load), alpha=BALANCING_RATE)

    def reset_bias(self) -> None:
        """Expert biases as they were initialised."""
        for router in self.routers.values():
            if router.expert_bias is not None:
                router.expert_bias.zero_()

    def _of_draws(self, space: ElasticSpace, plan: SubmodelPlan) -> dict[int, torch.Tensor]:
        found, (hidden,) = {}, space.choices_of(plan, ElasticAxis.HIDDEN)
        for layer in expert_layers(self.shape, plan):
            generator = torch.Generator().manual_seed(SEED + layer)
            states = torch.randn(self.options.tokens, 1, self.shape.hidden_size, generator=generator)[..., :hidden]
            found[layer] = self._load(self.routers[layer], states)
        return found

    def _of_text(self, space: ElasticSpace, plan: SubmodelPlan) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}

        def count(layer: int, result: Any) -> None:
            load = result[1].sum(0)
            found[layer] = found[layer] + load if layer in found else load

        hooks = [router.register_forward_hook(lambda *call, layer=layer: count(layer, call[-1])) for layer, router in self.routers.items()]
        positions = torch.arange(self.options.sequence)[None]
        for batch in self._text.split(8):
            self.model(batch, positions.expand_as(batch), None)
        for hook in hooks:
            hook.remove()
        return found

    @staticmethod
    def _load(router: Any, states: torch.Tensor) -> torch.Tensor:
        return router(states)[1].sum(0)


def _text(shape: ModelShape, options: Options) -> torch.Tensor:
    """[sequences, length]: bytes of files of the standard library."""
    if shape.vocab_size < 256:
        raise ConfigError(f"model.vocab_size {shape.vocab_size} does not hold every byte; give a recipe with at least 256")
    files = limit_bytes(find_files([STDLIB]), 4 * options.tokens, SEED)
    data = b"".join(file.path.read_bytes() for file in files)[: options.tokens]
    if len(data) < options.tokens:
        raise ConfigError(f"--tokens {options.tokens}: the standard library's sample has {len(data)}; ask for fewer")
    return torch.tensor(list(data)).view(-1, options.sequence)


def measure_experts(
    recipe: Recipe, space: ElasticSpace, options: Options, parallel: ParallelContext, ranks: Sequence[int]
) -> list[Balance]:
    """Live experts, routed tokens and FLOPs of every budget, scheme and expert parallelism."""
    shape, found = recipe.model, []
    plans, schemes = plans_of(recipe, space), spaces_of(space, recipe.model)
    for scheme, own in schemes.items():
        for budget, plan in plans.items():
            found += [Balance.of(budget, "EP", "live experts", scheme, live_experts(shape, own, plan, n)) for n in ranks]
    routing = Routing(recipe, parallel, options)
    for source in SOURCES if ranks else ():
        if source == "drawn":
            routing.balance_parent()
        else:
            routing.reset_bias()
        for scheme, own in schemes.items():
            for budget, plan in plans.items():
                print(f"routing: {source}, {scheme}, {budget}", file=sys.stderr, flush=True)
                counts = routing.counts(source, own, plan)
                for n in ranks:
                    tokens = [per_rank(count, n) for count in counts.values()]
                    flops = expert_flops(shape, plan, counts, options.tokens, options.sequence, n)
                    found.append(Balance.of(budget, "EP", f"{source} tokens", scheme, tokens))
                    found.append(Balance.of(budget, "EP", f"{source} FLOPs", scheme, flops))
    return found


def measure_tensor(recipe: Recipe, space: ElasticSpace, sequence: int, ranks: Sequence[int]) -> list[Balance]:
    """FLOPs of one sequence at every budget and tensor parallelism. No process group may be running."""
    shape, found = recipe.model, []
    plans = plans_of(recipe, space)
    for n in ranks:
        counted = [_count_rank(recipe, space, plans, sequence, n, rank) for rank in range(n)]
        for budget, plan in plans.items():
            work = [count[budget] for count in counted]
            expected = sequence * flops_per_token(shape, widths_of(plan, shape.num_layers), sequence)
            assert sum(work) == expected, f"TP {n}, {budget}: the ranks computed {sum(work)} FLOPs, the cost model says {expected}"
            found.append(Balance.of(budget, "TP", "FLOPs", "grouped", [work]))
            found.append(Balance.of(budget, "TP", "FLOPs", "prefix", [prefix_flops(shape, space, plan, sequence, n)]))
    return found


@torch.no_grad()
def _count_rank(
    recipe: Recipe, space: ElasticSpace, plans: Mapping[str, SubmodelPlan], sequence: int, ranks: int, rank: int
) -> dict[str, int]:
    """Budget -> FLOPs of a forward of one sequence on one tensor-parallel rank."""
    from torch.utils.flop_counter import FlopCounterMode

    with simulated_rank(ranks, rank) as parallel:
        from megatron_elastic.elastic.attach import elasticize
        from megatron_elastic.models.build import build_model

        print(f"FLOPs: TP {ranks}, rank {rank}", file=sys.stderr, flush=True)
        model = build_model(recipe.model, parallel, seed=SEED).eval()
        handle = elasticize(model, space, parallel, recipe.model)
        text, positions = torch.zeros(1, sequence, dtype=torch.long), torch.arange(sequence)[None]
        found = {}
        for budget, plan in plans.items():
            with handle.use(plan), FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
                model(text, positions, None)
            found[budget] = counter.get_total_flops()
    return found


@contextmanager
def simulated_rank(tensor: int, rank: int) -> Iterator[ParallelContext]:
    """This process as one of `tensor` tensor-parallel ranks of which no other exists: collectives return at once, with values of this rank only."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg.FakeStore is not None  # the import is what registers the backend "fake"
    # megatron also forms gloo groups, here of one rank each, which want a store that works.
    dist.init_process_group("fake", rank=rank, world_size=tensor, store=dist.HashStore())
    try:
        parallel = ParallelContext.initialize(tensor=tensor, sequence_parallel=tensor > 1)
        try:
            yield parallel
        finally:
            parallel.destroy()
    finally:
        dist.destroy_process_group()


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(query.shape, key.shape, value.shape)


_attention_flops._get_raw = True  # pyright: ignore[reportFunctionMemberAccess] - the counter hands over tensors, not shapes
CPU_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
"""torch's FLOP counter knows attention on GPUs only."""


def measure(options: Options) -> dict[str, Any]:
    """Count everything; the result is plain data, the object that is printed last. Starts and ends its own process groups."""
    recipe = load_recipe(options.shape)
    space = recipe.space
    if space is None:
        raise ConfigError(f"{options.shape} has no elastic block, so no budgets; give a recipe that has one")
    check_sequence_length(recipe.model, options.sequence, "--sequence")
    left_out = {f"{kind} {n}": _reason_against(recipe, kind, n) for kind in ("EP", "TP") for n in RANKS}
    expert, tensor = ([n for n in RANKS if not left_out[f"{kind} {n}"]] for kind in ("EP", "TP"))
    found: list[Balance] = []
    if expert:
        parallel = ParallelContext.initialize()
        try:
            found += measure_experts(recipe, space, options, parallel, expert)
        finally:
            parallel.destroy()
    found += measure_tensor(recipe, space, options.sequence, tensor)
    return {
        "benchmark": "balance",
        "format_version": FORMAT_VERSION,
        "recipe": str(options.shape),
        "shape": to_plain(recipe.model),
        "tokens": options.tokens,
        "sequence": options.sequence,
        "versions": {"torch": version("torch"), "megatron-core": version("megatron-core"), "megatron-elastic": __version__},
        "plans": {name: plan.to_dict() for name, plan in plans_of(recipe, space).items()},
        "bar": BAR,
        "left_out": {layout: why for layout, why in left_out.items() if why},
        "balances": [asdict(balance) for balance in found],
        "misses": [asdict(balance) for balance in found if balance.is_miss],
    }


def _reason_against(recipe: Recipe, kind: str, ranks: int) -> str:
    """Why this layout is not counted: the family does not run on it, or ranks repeat each other's work; empty when it is."""
    parallel = ParallelConfig(expert=ranks) if kind == "EP" else ParallelConfig(tensor=ranks)
    problems = recipe_problems(replace(recipe, parallel=parallel, stages=()))
    attention = recipe.model.attention
    if attention is not None and recipe.model.has("attention") and parallel.tensor > attention.kv_groups:
        problems.append(
            f"{ranks} ranks compute keys and values of {attention.kv_groups} KV groups more than once, which is not counted here"
        )
    return problems[0] if problems else ""


def print_report(result: dict[str, Any]) -> None:
    """The plans and two tables of max/mean for people, the misses; then one line of JSON with everything."""
    print(f"{result['recipe']}: {result['shape']['layer_pattern']}, hidden {result['shape']['hidden_size']}; {result['tokens']} tokens")
    for name, plan in result["plans"].items():
        print(f"  {name}: " + ", ".join(f"{axis} {width}" for axis, width in plan["widths"].items()))
    print("\nmax/mean over ranks, 'grouped | prefix'; a number of idle ranks stands in brackets where there are any\n")
    for kind in ("EP", "TP"):
        _print_table([balance for balance in result["balances"] if balance["layout"] == kind], kind)
    for layout, why in result["left_out"].items():
        print(f"{layout} is left out: {why}")
    parents = {(b["layout"], b["ranks"], b["quantity"]): b["imbalance"] for b in result["balances"] if b["budget"] == "parent"}
    for miss in result["misses"]:
        parent = "" if miss["budget"] == "parent" else f" (the parent: {parents[miss['layout'], miss['ranks'], miss['quantity']]:.3f})"
        print(f"above {BAR}: {miss['quantity']} of {miss['budget']} at {miss['layout']} {miss['ranks']}: {miss['imbalance']:.3f}{parent}")
    print(f"\n{len(result['misses'])} of {len(result['balances']) // len(SCHEMES)} above {BAR}\n")
    print(json.dumps(result))


def _print_table(balances: Sequence[Mapping[str, Any]], kind: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("budget", no_wrap=True)
    quantities = list(dict.fromkeys(balance["quantity"] for balance in balances))
    for title in (kind, *quantities):
        table.add_column(title, justify="right", no_wrap=True)
    cells = {(b["budget"], b["ranks"], b["quantity"], b["scheme"]): _cell(b) for b in balances}
    for budget, ranks in dict.fromkeys((b["budget"], b["ranks"]) for b in sorted(balances, key=lambda b: b["ranks"])):
        pairs = [" | ".join(cells[budget, ranks, quantity, scheme] for scheme in SCHEMES) for quantity in quantities]
        table.add_row(budget, str(ranks), *pairs)
    if balances:
        Console(width=140).print(table)
        print()


def _cell(balance: Mapping[str, Any]) -> str:
    return f"{balance['imbalance']:.2f}" + (f" ({balance['idle']})" if balance["idle"] else "")


def parse(arguments: Sequence[str] | None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", type=Path, default=Path(__file__).with_suffix(".yaml"), help="a recipe with an elastic block (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="tokens routed at each budget (default: %(default)s)")
    parser.add_argument("--sequence", type=int, default=256, help="tokens of a sequence, a multiple of 8 (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    if parsed.sequence < 1 or parsed.sequence % max(RANKS):
        parser.error(f"--sequence {parsed.sequence}: {max(RANKS)} tensor-parallel ranks divide its tokens; use a multiple of {max(RANKS)}")
    if parsed.tokens < 1 or parsed.tokens % parsed.sequence:
        parser.error(f"--tokens {parsed.tokens} is not a multiple of --sequence {parsed.sequence}")
    return Options(parsed.shape, parsed.tokens, parsed.sequence)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = parse(arguments)
    return outcome(lambda: measure(options), print_report)


if __name__ == "__main__":
    sys.exit(main())
