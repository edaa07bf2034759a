"""Draw docs/images/family.png from recipes/demo_hybrid.yaml: python docs/images/family.py"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.config import load_recipe
from megatron_elastic.cost import active_params, widths_of

COLOURS = {"full": "#c6dbef", "medium": "#6baed6", "small": "#2171b5"}


def main() -> None:
    """One weight of each kind of layer, with the part that each member keeps."""
    recipe = load_recipe(Path("recipes/demo_hybrid.yaml"))
    space, shape = recipe.space, recipe.model
    assert space is not None
    # For the eye: the parent, the middle choice of every axis, and the narrowest.
    plans = {
        name: space.plan({spec.axis: spec.choices[round(share * (len(spec.choices) - 1))] for spec in space.axes})
        for name, share in (("full", 0.0), ("medium", 0.4), ("small", 1.0))
    }
    panels = (
        ("Mamba: heads of 4 SSM groups", ElasticAxis.MAMBA_HEADS, 4),
        ("attention: query heads of 2 KV groups", ElasticAxis.HEADS, 2),
        ("dense MLP: neurons of 2 shard groups", ElasticAxis.FFN, 2),
        ("experts of 2 groups", ElasticAxis.EXPERTS, 2),
    )
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.6))
    hidden = dict(space.parent.widths)[ElasticAxis.HIDDEN]
    for panel, (title, axis, groups) in zip(axes, panels, strict=True):
        whole = dict(space.parent.widths)[axis]
        for name, plan in plans.items():
            for group in range(groups):
                height = plan.width(axis) / whole / groups
                panel.add_patch(
                    Rectangle(
                        (0, group / groups), plan.width(ElasticAxis.HIDDEN) / hidden, height, facecolor=COLOURS[name], edgecolor="white"
                    )
                )
        for group in range(1, groups):
            panel.axhline(group / groups, color="#444444", lw=1)
        panel.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], title=title, xlabel="residual channels")
        panel.title.set_fontsize(10)
    axes[0].set_ylabel("rows of the weight")
    labels = [f"{name}: {active_params(shape, widths_of(plan, shape.num_layers)) / 1e3:,.0f} k active" for name, plan in plans.items()]
    handles = [Rectangle((0, 0), 1, 1, facecolor=COLOURS[name]) for name in plans]
    figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig("docs/images/family.png", dpi=110)


if __name__ == "__main__":
    main()
