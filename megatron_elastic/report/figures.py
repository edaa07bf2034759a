"""All plots of a report with their titles and what they show, in the order in which a reader wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_elastic.report.importance_plots import plot_depth, plot_experts, plot_spread
from megatron_elastic.report.plots import plot_costs, plot_losses, plot_quality, plot_rates
from megatron_elastic.report.record import RunRecord
from megatron_elastic.report.router_plots import plot_layers, plot_router
from megatron_elastic.report.summary import BudgetRow


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of a report; file: name of its PNG in the directory of plots; caption: what a reader sees there."""

    file: str
    title: str
    caption: str


def draw_plots(record: RunRecord, rows: Sequence[BudgetRow], baseline_rows: Sequence[BudgetRow], directory: Path) -> list[Plot]:
    """Write the plots of a run into a directory that exists; returns those that there is something to show of.

    The file of an earlier report that there is nothing to show of now is removed.
    """

    def quality(_: RunRecord, path: Path) -> None:
        plot_quality(record, rows, baseline_rows, path)

    drawn = []
    for draw, plot in ((quality, QUALITY), *ALWAYS):
        draw(record, directory / plot.file)
        drawn.append(plot)
    for attempt, plot in SOMETIMES:
        if attempt(record, directory / plot.file):
            drawn.append(plot)
        else:
            (directory / plot.file).unlink(missing_ok=True)
    return drawn


QUALITY = Plot(
    "quality_vs_cost.png",
    "Quality against cost",
    "Held-out loss of the newest evaluation of every member against what it costs; lower and further left is better. "
    "Hollow points are the baseline's, the star is the frozen parent.",
)
ALWAYS: tuple[tuple[Callable[[RunRecord, Path], None], Plot], ...] = (
    (
        plot_losses,
        Plot(
            "loss_per_budget.png",
            "Loss of every budget",
            "Above, the held-out loss at every evaluation; below, the training loss of the samples that ran each budget, with its running mean. "
            "The dashed line is the frozen parent. Losses of stages with different sequence lengths do not continue each other.",
        ),
    ),
    (
        plot_costs,
        Plot(
            "cost_vs_target.png",
            "Cost against target",
            "Lines: expected cost of the decisions trained on. Diamonds: exact cost of the plan at an evaluation. "
            "Inside the grey band the budget loss is zero.",
        ),
    ),
    (
        plot_rates,
        Plot("learning_rate_and_speed.png", "Learning rate and speed", "Of every step, over the tokens of the run, all stages."),
    ),
)
SOMETIMES: tuple[tuple[Callable[[RunRecord, Path], bool], Plot], ...] = (
    (
        plot_router,
        Plot(
            "router.png",
            "What the router chooses",
            "Probability of every choice at each evaluation, the widest at the bottom; of a per-layer axis the mean over its layers. "
            "A choice is made when one colour fills a panel.",
        ),
    ),
    (
        plot_layers,
        Plot("router_per_layer.png", "What the router chooses in each layer", "Expected width over the parent's at each evaluation."),
    ),
    (
        plot_spread,
        Plot(
            "importance.png",
            "How importance is spread over each axis",
            "Importance of the parent's components before it was sorted, from the best on the left to the worst, over the best of their layer; below "
            "the axis stands the criterion. Where the colour fades early, an axis can shrink at little cost; where it stays dark, every component "
            "counts. Where each expert or each SSM group has an order of its own, their mean.",
        ),
    ),
    (
        plot_depth,
        Plot(
            "importance_depth.png",
            "What the parent loses without its layers",
            "Left, layers dropped one after the other, each time the one that is missed least: how far the predictions are from the whole "
            "model's, KL in nats per token. Right, how far each layer alone turns what passes it: 1 - cosine of its input and output.",
        ),
    ),
    (
        plot_experts,
        Plot(
            "importance_experts.png",
            "How much each expert matters",
            "Experts have the numbers they had before the parent was sorted. Coverage: the tokens routed to each; the score of an expert that few "
            "tokens reached is little more than chance.",
        ),
    ),
)
