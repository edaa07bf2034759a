"""The one table of layouts, models and modes that a training step is proved on. Adding a layout is a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_elastic.platform.versions import interleaves_hybrid
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape


@dataclass(frozen=True)
class Layout:
    """parallel: the recipe's block; ranks: processes it runs on, data parallelism included; without_experts: whether it takes no experts."""

    parallel: Mapping[str, Any]
    ranks: int = 2
    without_experts: bool = False


LAYOUTS: Mapping[str, Layout] = {
    "DP2": Layout({}),
    "TP2": Layout({"tensor": 2, "sequence_parallel": False}, without_experts=True),
    "TP2+SP": Layout({"tensor": 2}),
    "PP2": Layout({"pipeline": 2}),
    "PP2 recomputing": Layout({"pipeline": 2, "recompute": "full"}),
    "VPP2": Layout({"pipeline": 2, "virtual_pipeline": 2}),
    "EP2": Layout({"expert": 2}),
    "EP2 gathering": Layout({"expert": 2, "dispatcher": "allgather"}),
    "CP2": Layout({"context": 2}),
    "EP2xETP2": Layout({"tensor": 2, "expert": 2, "expert_tensor": 2}, ranks=4),
    "TP2xPP2": Layout({"tensor": 2, "pipeline": 2}, ranks=4),
    "TP2xEP2": Layout({"tensor": 2, "expert": 2}, ranks=4),
    "TP2xCP2": Layout({"tensor": 2, "context": 2}, ranks=4),
    "TP2xVPP2": Layout({"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}, ranks=4),
    "PP2xEP2": Layout({"pipeline": 2, "expert": 2}, ranks=4),
    "PP2xCP2": Layout({"pipeline": 2, "context": 2}, ranks=4),
    "VPP2xEP2": Layout({"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, ranks=4),
    "VPP2xCP2": Layout({"pipeline": 2, "virtual_pipeline": 2, "context": 2}, ranks=4),
    "EP2xCP2": Layout({"expert": 2, "context": 2}, ranks=4),
}
MODES = ("soft", "hard")


def models() -> dict[str, ModelShape]:
    """The parents: sizes pairwise different, grouped queries, biases; both kinds of norm, of gate and of router, tied and not."""
    moe, hybrid = tiny_moe(), tiny_shape()
    assert moe.moe is not None and hybrid.moe is not None
    return {
        "dense": tiny_dense(gated=False, tied_embeddings=True),
        "dense, gated": tiny_dense(),
        "moe": replace(moe, moe=replace(moe.moe, aux_loss=0.02, z_loss=0.03)),
        "hybrid": replace(hybrid, layer_pattern="ME*-ME*M", tied_embeddings=False),
        "hybrid without experts": replace(hybrid, layer_pattern="M-*M", moe=None),
    }


def cases() -> list[tuple[str, str, str]]:
    """(layout, model, mode) of every combination that exists."""
    found = []
    for name, layout in LAYOUTS.items():
        for model, shape in models().items():
            if (
                shape.has("moe")
                and layout.without_experts
                or (model == "hybrid without experts") != (layout.without_experts and not shape.is_gpt)
            ):
                continue
            if "expert" in layout.parallel and not shape.has("moe") or (model == "dense, gated" and not layout.without_experts):
                continue
            if "virtual_pipeline" in layout.parallel and not shape.is_gpt and not interleaves_hybrid():
                continue
            found += [(name, model, mode) for mode in MODES]
    return found
