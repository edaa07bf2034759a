"""The plots of a run's losses, costs and speed. Each function writes one PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_elastic.recipe import DistillConfig
from megatron_elastic.report.record import RunRecord
from megatron_elastic.report.style import PARENT_COLOUR, colours, drawing, legend_above, mark_stages, plain, running_mean
from megatron_elastic.report.summary import BudgetRow
from megatron_elastic.report.units import Scale, cost_scale, count_scale
from megatron_elastic.router.schedules import tolerance

MODEL_COLOUR, ROUTER_COLOUR = "#0072B2", "#D55E00"
SMOOTHED_FROM = 8
"""Points of one budget in one stage from which on a running mean is drawn over them."""


def plot_losses(record: RunRecord, path: Path) -> None:
    """Held-out loss and training loss of every budget over the tokens of the run, with the parent's held-out loss."""
    scale = count_scale(record.last_token(record.stages[-1]), "tokens of the run")
    with drawing(path, 7.6, 6.2) as figure:
        held_out, training = figure.subplots(2, 1, sharex=True)
        _draw_held_out(held_out, record, scale)
        _draw_training(training, record, scale)
        training.set_xlabel(scale.label)
        handles, labels = held_out.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        legend_above(figure, list(unique.values()), list(unique))
        training.set_xlim(*_token_span(record, scale))
        spans = [(stage, record.first_token(stage) / scale.divisor, record.last_token(stage) / scale.divisor) for stage in record.stages]
        mark_stages(held_out, spans, titles=True)
        mark_stages(training, spans, titles=False)


def _token_span(record: RunRecord, scale: Scale, *, from_start: bool = False) -> tuple[float, float]:
    """The limits of the token axis: all elastic stages (all stages, where `from_start`) and a little air."""
    first, last = 0 if from_start else record.first_token(record.stages[0]), record.last_token(record.stages[-1])
    air = 0.015 * (last - first)
    return (first - air) / scale.divisor, (last + air) / scale.divisor


def _draw_held_out(axes: Any, record: RunRecord, scale: Scale) -> None:
    for name, colour in colours(record.budgets).items():
        for stage in record.stages:  # one line a stage: losses of different sequence lengths do not continue each other
            rows = record.rows_of("eval", stage)
            tokens = [row.tokens / scale.divisor for row in rows]
            axes.plot(tokens, [row.values["loss"][name] for row in rows], color=colour, marker="o", label=name)
    for stage in record.stages:
        loss = record.parent_loss(stage)
        if loss is not None:
            ends = [record.first_token(stage) / scale.divisor, record.last_token(stage) / scale.divisor]
            axes.plot(ends, [loss, loss], color=PARENT_COLOUR, linestyle="--", linewidth=1.4, label="parent")
    axes.set_ylabel("held-out loss\n(nats per token)")


def _draw_training(axes: Any, record: RunRecord, scale: Scale) -> None:
    for name, colour in colours(record.budgets).items():
        for stage in record.stages:
            # The full budget starts at a divergence of exactly 0, which a logarithmic axis cannot show.
            rows = [row for row in record.rows_of("train", stage) if row.values["by_budget"].get(name, 0.0) > 0]
            tokens = [row.tokens / scale.divisor for row in rows]
            _draw_noisy(axes, tokens, [row.values["by_budget"][name] for row in rows], colour)
    axes.set_yscale("log")
    axes.set_ylabel(f"training loss\n({_objective(record.recipe.distill)})")


def _objective(distill: DistillConfig) -> str:
    terms = {"KL from the parent": distill.kl_weight, "cross-entropy": distill.ce_weight}
    parts = [name if weight == 1 else f"{weight:g} x {name}" for name, weight in terms.items() if weight]
    return f"{' + '.join(parts)}, per token"


def _draw_noisy(axes: Any, x: Sequence[float], y: Sequence[float], colour: str) -> None:
    """A line; when it has many points, thin, under its running mean."""
    smooth = len(y) >= SMOOTHED_FROM
    axes.plot(x, y, color=colour, linewidth=0.8 if smooth else 1.4, alpha=0.35 if smooth else 0.9)
    if smooth:
        axes.plot(x, running_mean(y, max(5, len(y) // 12)), color=colour)


def plot_costs(record: RunRecord, path: Path) -> None:
    """Cost over target of every budget over the elastic steps: of the decisions trained on, and of the hard plans, in the tolerance."""
    from matplotlib.lines import Line2D

    with drawing(path, 7.6, 4.2) as figure:
        axes = figure.subplots()
        band = _draw_tolerance(axes, record)
        for name, colour in colours(record.budgets).items():
            for stage in record.stages:
                drawn = [row for row in record.rows_of("train", stage) if name in row.values["cost_ratio"]]
                _draw_noisy(axes, [record.elastic_step(row) for row in drawn], [row.values["cost_ratio"][name] for row in drawn], colour)
            plans = [row for stage in record.stages for row in record.rows_of("eval", stage)]
            ratios = [row.values["cost_ratio"][name] for row in plans]
            axes.plot(
                [record.elastic_step(row) for row in plans],
                ratios,
                color=colour,
                marker="D",
                linestyle="none",
                markersize=7,
                markeredgecolor="white",
            )
        handles = [Line2D([], [], color=colour, label=name) for name, colour in colours(record.budgets).items()]
        handles += [
            Line2D([], [], color="#777777", linewidth=1, label="expected"),
            Line2D([], [], color="#777777", marker="D", markeredgecolor="white", linestyle="none", label="hard plan"),
            band,
            *_mark_fixed(axes, record),
        ]
        legend_above(figure, handles, [str(handle.get_label()) for handle in handles])
        assert record.recipe.elastic is not None
        axes.set(xlabel="elastic steps", ylabel=f"cost / target ({record.recipe.elastic.cost})")
        last = record.first_step(len(record.stages))
        axes.set_xlim(-0.015 * last, 1.015 * last)
        axes.locator_params(axis="x", integer=True)
        spans = [(stage, record.first_step(number), record.first_step(number + 1)) for number, stage in enumerate(record.stages)]
        mark_stages(axes, spans, titles=True)


def _draw_tolerance(axes: Any, record: RunRecord) -> Any:
    """The band inside which the budget loss is zero, over all elastic steps; returns its handle."""
    last = record.first_step(len(record.stages))
    start, end = record.recipe.router.tolerance
    steps = list(range(last + 1))
    learned = [min(step / max(last - 1, 1) / record.recipe.router.learn_share, 1.0) for step in steps]
    allowed = [tolerance(share, start, end=end) for share in learned]
    axes.axhline(1, color="#999999", linewidth=0.8, zorder=1)
    return axes.fill_between(
        steps, [1 - one for one in allowed], [1 + one for one in allowed], color="#BBBBBB", alpha=0.5, linewidth=0, label="tolerance"
    )


def _mark_fixed(axes: Any, record: RunRecord) -> list[Any]:
    """Mark the step from which a learned router's plans stand; returns its handle, none when the router learns to the end."""
    router = record.recipe.router
    if router.choice != "learned" or router.learn_share == 1:
        return []
    step = router.learn_share * (record.first_step(len(record.stages)) - 1)
    return [axes.axvline(step, color="#777777", linewidth=1.2, linestyle=(0, (6, 2)), zorder=1, label="plans fixed")]


def plot_rates(record: RunRecord, path: Path) -> None:
    """Learning rates and tokens per second of every step over the tokens of the run, all stages."""
    stages = [stage for stage in record.recipe.stages if record.rows_of("train", stage)]
    scale = count_scale(record.last_token(record.stages[-1]), "tokens of the run")
    with drawing(path, 7.6, 4.8) as figure:
        rates, speed = figure.subplots(2, 1, sharex=True)
        for stage in stages:
            rows = record.rows_of("train", stage)
            tokens = [row.tokens / scale.divisor for row in rows]
            rates.plot(tokens, [row.values["lr"] for row in rows], color=MODEL_COLOUR, label="model")
            routed = [row for row in rows if "router_lr" in row.values]  # runs of earlier releases have no such column
            if routed:
                values = [row.values["router_lr"] for row in routed]
                rates.plot([row.tokens / scale.divisor for row in routed], values, color=ROUTER_COLOUR, linestyle="--", label="router")
            _draw_noisy(speed, tokens, [row.values["tokens_per_second"] for row in rows], MODEL_COLOUR)
        rates.set(yscale="log", ylabel="learning rate")
        speed.set(xlabel=scale.label, ylabel="tokens per second")
        speed.set_ylim(bottom=0)
        speed.set_xlim(*_token_span(record, scale, from_start=True))
        handles, labels = rates.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        legend_above(figure, list(unique.values()), list(unique))
        spans = [
            (stage, record.first_token(stage) / scale.divisor, record.last_token(stage) / scale.divisor) for stage in record.recipe.stages
        ]
        mark_stages(rates, spans, titles=True)
        mark_stages(speed, spans, titles=False)


def plot_quality(record: RunRecord, rows: Sequence[BudgetRow], baseline_rows: Sequence[BudgetRow], path: Path) -> None:
    """Held-out loss of the newest evaluation against cost: the family's members, the baseline's, and the parent."""
    from matplotlib.patheffects import withStroke

    assert record.recipe.elastic is not None
    kind, stage, palette = record.recipe.elastic.cost, record.last_stage, colours(record.budgets)
    scale = cost_scale(max(row.cost for row in [*rows, *baseline_rows]), kind)
    halo = withStroke(linewidth=3, foreground="white")  # keeps a name readable on another family's line
    with drawing(path, 6.4, 4.4) as figure:
        axes = figure.subplots()
        parent = record.parent_loss(stage)
        if parent is not None:
            axes.plot(rows[0].target / scale.divisor, parent, "*", color=PARENT_COLOUR, markersize=17, label="parent", zorder=2)
        for members, line, hollow in ((baseline_rows, "--", True), (rows, "-", False)):
            if members:
                _draw_members(axes, members, scale, palette, line=line, hollow=hollow)
        for row in rows:
            place = (row.cost / scale.divisor, row.last_loss)
            words = {"color": palette[row.budget], "fontweight": "bold", "ha": "right", "va": "top"}
            axes.annotate(plain(row.budget), place, xytext=(-6, -6), textcoords="offset points", path_effects=[halo], **words)
        axes.set(
            xlabel=scale.label, ylabel=f"held-out loss in stage {plain(stage.name)}\n(nats per token, {stage.sequence_length:,} tokens)"
        )
        axes.margins(y=0.18)
        _leave_room(axes, [row.cost / scale.divisor for row in [*rows, *baseline_rows]], max(len(row.budget) for row in rows))
        legend_above(figure, *axes.get_legend_handles_labels())


def _leave_room(axes: Any, costs: Sequence[float], characters: int) -> None:
    """Limit the axis of costs so that a name of so many characters stands left of the first member, and a little right of the last."""
    span = max(costs) - min(costs) or max(costs)
    left = min(0.06 + 0.017 * characters, 0.5)  # shares of the axis
    whole = span / (0.92 - left)
    axes.set_xlim(min(costs) - left * whole, min(costs) + (1 - left) * whole)


def _draw_members(axes: Any, rows: Sequence[BudgetRow], scale: Scale, palette: dict[str, str], *, line: str, hollow: bool) -> None:
    """One family as a line through its members, which have their budgets' colours."""
    costs, losses = [row.cost / scale.divisor for row in rows], [row.last_loss for row in rows]
    axes.plot(costs, losses, line, color="#999999", linewidth=1.2, zorder=1)
    source = rows[-1].plan_source
    for cost, loss, row in zip(costs, losses, rows, strict=True):
        face = "white" if hollow else palette[row.budget]
        axes.plot(cost, loss, "o", markersize=8, color=palette[row.budget], markerfacecolor=face, markeredgewidth=1.8, zorder=3)
    style = {"marker": "o", "markersize": 7, "linestyle": line, "linewidth": 1.2}
    axes.plot([], [], color="#999999", markerfacecolor="white" if hollow else "#999999", label=f"{rows[0].run} ({source})", **style)
