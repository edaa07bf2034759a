"""Which criterion keeps the right components: perplexity of members that are cut out by each one's ranking, without any training.

`widths`: a dense model (SmolLM2-135M: docs/smollm2.md imports it) at shares of hidden, ffn, layers and heads, each alone and jointly, on code and on
prose that calibration has not seen (`ranking_texts.py`); beside our criteria nvidia-modelopt's own Minitron scores, from an
environment of its own (`modelopt_minitron/`). Layers are dropped in each one's own order: greedy by divergence for ours, shuffled for `random`.
`experts`: a mixture of experts (train one by `ranking_quality.yaml`) at shares of its experts, on the held-out split of its data.
Rankings and points are kept in --directory, so a run that was stopped goes on, and another criterion costs its own points only.
The last line of the output is one JSON object.

Examples:
  python -m benchmarks.ranking_quality widths runs/smollm2
  python -m benchmarks.ranking_quality experts runs/ranking_moe --data runs/demo_data
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import outcome
from benchmarks.ranking_points import Point, Verdict, choices, compare, expert_points, over_parent, tables, width_points
from benchmarks.ranking_store import Points, stored_ranking
from benchmarks.ranking_texts import Rows, Texts, data_texts, read_texts
from megatron_elastic import __version__
from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.elastic.attach import elasticize
from megatron_elastic.errors import UnsupportedError
from megatron_elastic.export.evaluate import Evaluator
from megatron_elastic.export.load import load_model
from megatron_elastic.export.prompts import find_tokenizer
from megatron_elastic.export.sources import Source, open_source
from megatron_elastic.importance.collect import collect
from megatron_elastic.importance.criteria import CriterionName, ExpertCriterion
from megatron_elastic.importance.dealing import Permutations, drop_order, permutations
from megatron_elastic.importance.depth import depth_order
from megatron_elastic.importance.ranking import Ranking, fingerprint_of
from megatron_elastic.importance.sort import permute
from megatron_elastic.importance.text import rows_of_documents
from megatron_elastic.models.weights import generator_of
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.space import build_space

FORMAT_VERSION = 1
DEFAULTS = {"widths": CriterionName.ENERGY.value, "experts": ExpertCriterion.REAP.value}
"""What `rank` uses where nobody asks for another."""
MODELOPT = "modelopt"
SIZES = {"widths": (1024, 16384, 4096), "experts": (256, 131072, 16384)}
"""Tokens of a row, to calibrate on, and of each text that is judged by."""
DEPTH_TOKENS, DEPTH_ROW = 2048, 256
"""Tokens to order layers on, and of each row of them, from the middle of a row to calibrate on: a file begins with its licence."""
SEED = 1234


@dataclass(frozen=True, slots=True)
class Options:
    """kind: widths or experts; path: of the model; directory: where results are kept; criteria: that are compared; data: of experts.

    sequence_length: tokens of a row; calibration: tokens to rank on; judged: tokens of each text that is judged by.
    """

    kind: str
    path: Path
    directory: Path
    criteria: tuple[str, ...]
    data: Path | None
    sequence_length: int
    calibration: int
    judged: int


class Bench:
    """A model, the texts, and what is known already."""

    def __init__(self, source: Source, texts: Texts, parallel: ParallelContext, options: Options) -> None:
        self.source, self.texts, self.parallel, self.options = source, texts, parallel, options
        self.fingerprint = fingerprint_of(source.tensors, source.shape)
        self.points = Points(options.directory / "points.json", (self.fingerprint, texts.fingerprint))

    def ranking(self, name: str) -> Ranking:
        """The scores of one criterion, computed once."""
        make = self._modelopt if name == MODELOPT else self._experts if self.options.kind == "experts" else self._widths
        return stored_ranking(self.options.directory, name, (self.fingerprint, self.texts.fingerprint), lambda: self._said(name, make))

    def _said(self, name: str, make: Callable[[str], Ranking]) -> Ranking:
        say(f"ranking: {name}")
        return make(name)

    def _made(self, criteria: Mapping[ElasticAxis, str], scores: Mapping[ElasticAxis, Mapping[int | None, torch.Tensor]]) -> Ranking:
        return Ranking(self.source.shape, criteria, scores, {"model": {"path": str(self.source.path), "fingerprint": self.fingerprint}})

    def _widths(self, name: str) -> Ranking:
        shape, parallel = self.source.shape, self.parallel
        model, rows = load_model(self.source, parallel), rows_of_documents(self.texts.calibration, self.options.sequence_length)
        found = collect([model], shape, parallel, rows, criterion=name, seed=SEED)
        if name == CriterionName.RANDOM:
            layers = torch.rand(shape.num_layers, generator=generator_of(SEED, "layers"), dtype=torch.float64)
        else:
            layers = self._depth()
        scores = {**found.scores, ElasticAxis.LAYERS: {None: layers}}
        return self._made({**found.criteria, ElasticAxis.LAYERS: "random" if name == CriterionName.RANDOM else "kl"}, scores)

    def _depth(self) -> torch.Tensor:
        """One order for all criteria that have none of their own, computed once."""

        def make() -> Ranking:
            say("ranking: layers, greedily")
            middle = self.options.sequence_length // 2
            few = [row[middle : middle + DEPTH_ROW + 1] for row in self.texts.calibration[: DEPTH_TOKENS // DEPTH_ROW]]
            model = load_model(self.source, self.parallel)
            order = depth_order([model], self.source.shape, self.parallel, rows_of_documents(few, DEPTH_ROW), progress=_every(20))
            return self._made({ElasticAxis.LAYERS: "kl"}, {ElasticAxis.LAYERS: {None: order.scores()}})

        stored = stored_ranking(self.options.directory, "depth", (self.fingerprint, self.texts.fingerprint), make)
        return stored.scores[ElasticAxis.LAYERS][None]

    def _experts(self, name: str) -> Ranking:
        model, rows = load_model(self.source, self.parallel), rows_of_documents(self.texts.calibration, self.options.sequence_length)
        found = collect([model], self.source.shape, self.parallel, rows, criterion=CriterionName.RANDOM, experts=name, seed=SEED)
        return self._made(found.criteria, found.scores)

    def _modelopt(self, name: str) -> Ranking:
        from benchmarks.modelopt_minitron.scores import minitron_scores
        from scripts.bootstrap import SetupError

        try:
            scores = minitron_scores(self.source, self.texts.calibration, self.options.directory)
        except (SetupError, subprocess.CalledProcessError) as error:
            raise UnsupportedError(f"{MODELOPT}: {error}; leave it out with --criteria") from error
        return self._made(dict.fromkeys(scores, name), scores)

    def parent(self) -> dict[str, float]:
        """Text -> loss of the whole model."""
        evaluator = None
        found = {}
        for text, rows in self.texts.judged.items():
            if (loss := self.points.get("parent", text)) is None:
                say(f"parent, {text}")
                evaluator = evaluator or Evaluator(load_model(self.source, self.parallel), None, self.source.shape, self.parallel)
                loss = self.points.put("parent", text, evaluator.losses({"parent": None}, rows, self.options.sequence_length)["parent"])
            found[text] = loss
        return found

    def judge(self, ranking: Ranking, points: Sequence[Point]) -> dict[tuple[str, str], float]:
        """(point, text) -> loss of the member that the ranking keeps. What two rankings keep alike is computed once."""
        shape = self.source.shape
        widths = choices(points, shape)
        deepest = shape.num_layers - min(widths.get(ElasticAxis.LAYERS, (shape.num_layers,)))
        space = build_space(shape, widths, shard_groups=1, drop_order=drop_order(ranking)[:deepest])
        moves, model, found = permutations(ranking, space), None, {}
        for point in points:
            plan = space.plan(point.widths(shape))
            key = kept(plan, space, moves)
            for text, rows in self.texts.judged.items():
                if (loss := self.points.get(key, text)) is None:
                    model = model or self._family(space, moves)
                    loss = self.points.put(key, text, self._loss(model, plan, rows))
                    say(f"  {point.name}, {text}: {loss:.4f}")
                found[point.name, text] = loss
        return found

    def _family(self, space: ElasticSpace, moves: Permutations) -> Evaluator:
        shape = self.source.shape
        model = load_model(replace(self.source, tensors=permute(self.source.tensors, shape, moves)), self.parallel)
        return Evaluator(model, elasticize(model, space, self.parallel, shape), shape, self.parallel)

    def _loss(self, evaluator: Evaluator, plan: SubmodelPlan, rows: Rows) -> float:
        return evaluator.losses({"member": plan}, rows, self.options.sequence_length)["member"]


def kept(plan: SubmodelPlan, space: ElasticSpace, moves: Permutations) -> str:
    """What a plan keeps of the model before it was sorted, as text: the same for two rankings that keep the same components."""
    found: dict[str, Any] = {"dropped": plan.dropped_layers}
    for spec in space.axes:
        if spec.axis is ElasticAxis.LAYERS or (width := space.choices_of(plan, spec.axis)[0]) == spec.parent:
            continue
        for layer, order in moves[spec.axis].items():
            each = order.reshape(*order.shape[:-1], spec.groups, -1)[..., : width // spec.groups]
            found[f"{spec.axis.value}/{layer}"] = each.flatten(-2).sort().values.tolist()
    return json.dumps(found, sort_keys=True)


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def _every(count: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done % count == 0:
            say(f"  {done}/{total}")

    return progress


def measure(options: Options) -> dict[str, Any]:
    """Everything that is reported."""
    from megatron_elastic.platform import prepare_platform

    prepare_platform()
    source, parallel = open_source(options.path), ParallelContext.initialize()
    try:
        options.directory.mkdir(parents=True, exist_ok=True)
        bench = Bench(source, _texts(source, options), parallel, options)
        points = width_points() if options.kind == "widths" else expert_points()
        parent, losses = bench.parent(), {}
        for name in options.criteria:
            ranking = bench.ranking(name)
            say(name)
            losses |= {(name, *where): loss for where, loss in bench.judge(ranking, points).items()}
    finally:
        parallel.destroy()
    return _result(options, bench, parent, losses, [point.name for point in points])


def _texts(source: Source, options: Options) -> Texts:
    sizes = {"calibration": options.calibration, "judged": options.judged, "sequence_length": options.sequence_length}
    if options.data is not None:
        return data_texts(options.data, source.shape.vocab_size, **sizes)
    return read_texts(find_tokenizer(source, None), **sizes)


def _result(
    options: Options, bench: Bench, parent: Mapping[str, float], losses: Mapping[tuple[str, str, str], float], points: Sequence[str]
) -> dict[str, Any]:
    default = DEFAULTS[options.kind]
    against = [name for name in options.criteria if name != default] if default in options.criteria else []
    return {
        "benchmark": "ranking_quality",
        "format_version": FORMAT_VERSION,
        "kind": options.kind,
        "model": {"path": str(options.path), "fingerprint": bench.fingerprint},
        "texts": {"fingerprint": bench.texts.fingerprint, "tokens": [options.sequence_length, options.calibration, options.judged]},
        "versions": {"megatron-elastic": __version__, "torch": torch.__version__},
        "parent": dict(parent),
        "points": list(points),
        "criteria": list(options.criteria),
        "losses": [[*where, loss] for where, loss in losses.items()],
        "over_parent": {name: over_parent(losses, name, parent, points) for name in options.criteria},
        "default": default,
        "default_against": {name: asdict(compare(losses, default, name)) for name in against},
    }


def print_report(result: Mapping[str, Any]) -> None:
    """Tables, how the default compares, and the JSON line."""
    losses = {(name, point, text): loss for name, point, text, loss in result["losses"]}
    print(tables(losses, result["parent"], result["points"], result["criteria"]))
    print()
    for name, found in result["default_against"].items():
        verdict = Verdict(**{**found, "worst_at": tuple(found["worst_at"])})
        print(
            f"{result['default']} against {name}: at least as good at {verdict.at_least_as_good:.0%} of the points, "
            f"{verdict.ratio:.3f} of its perplexity on average, worst {verdict.worst:.3f} ({', '.join(verdict.worst_at)})"
        )
    print(json.dumps(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    known = {"widths": (*(name.value for name in CriterionName), MODELOPT), "experts": tuple(name.value for name in ExpertCriterion)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, names in known.items():
        one = kinds.add_parser(kind)
        one.add_argument("path", type=Path, help="a run, a checkpoint or a Hugging Face directory")
        one.add_argument("--directory", type=Path, default=Path("runs/ranking_quality"), help="where rankings and points are kept")
        one.add_argument("--criteria", nargs="+", choices=names, default=list(names))
        for option, size in zip(("--sequence-length", "--calibration-tokens", "--judged-tokens"), SIZES[kind], strict=True):
            one.add_argument(option, type=int, default=size)
        if kind == "experts":
            one.add_argument("--data", type=Path, required=True, help="a data directory")
    given = parser.parse_args(arguments)
    options = Options(
        kind=given.kind,
        path=given.path,
        directory=given.directory,
        criteria=tuple(given.criteria),
        data=given.data if given.kind == "experts" else None,
        sequence_length=given.sequence_length,
        calibration=given.calibration_tokens,
        judged=given.judged_tokens,
    )
    return outcome(lambda: measure(options), print_report)


if __name__ == "__main__":
    sys.exit(main())
