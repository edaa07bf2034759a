"""Elastic models for megatron-core: one training run of one parent that holds a family of nested sub-models.

The names of `__all__` are the public ones, and each is imported when it is asked for: importing this package imports nothing else, and what
needs no torch (recipes, shapes, plans, costs) does not import it. `megatron_elastic.cli` is the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_elastic.axes import AxisSpec, ElasticAxis, ElasticSpace, SubmodelPlan
    from megatron_elastic.checkpoint.files import CheckpointInfo, find_model_checkpoint, open_checkpoint
    from megatron_elastic.checkpoint.named import NamedTensors, write_named
    from megatron_elastic.checkpoint.sharded.load import load_checkpoint
    from megatron_elastic.checkpoint.sharded.save import save_checkpoint
    from megatron_elastic.config import load_recipe
    from megatron_elastic.cost import active_params, cost_function, flops_per_token, total_params, weight_bytes, widths_of
    from megatron_elastic.elastic.attach import ElasticHandle, elasticize
    from megatron_elastic.elastic.decision import Decision, Mode, soft_decision
    from megatron_elastic.errors import CheckpointError, ConfigError, DataError, ElasticError, PlanError, UnsupportedError
    from megatron_elastic.export.extract import extract
    from megatron_elastic.export.generate import Continuation, GenerateOptions, generate
    from megatron_elastic.export.load import load_model
    from megatron_elastic.export.sampling import Sampling
    from megatron_elastic.export.write import write_submodel
    from megatron_elastic.memory import MemoryTarget, memory_bytes
    from megatron_elastic.models.build import build_model
    from megatron_elastic.parallel import ParallelContext
    from megatron_elastic.planning import nearest_plan, plan_cost
    from megatron_elastic.recipe import Recipe
    from megatron_elastic.shape import AttentionShape, MambaShape, MlpShape, ModelShape, MoeShape
    from megatron_elastic.space import AxisChoices, build_space, parent_plan, resize

__version__ = "0.1.0"

__all__ = [
    "AttentionShape",
    "AxisChoices",
    "AxisSpec",
    "CheckpointError",
    "CheckpointInfo",
    "ConfigError",
    "Continuation",
    "DataError",
    "Decision",
    "ElasticAxis",
    "ElasticError",
    "ElasticHandle",
    "ElasticSpace",
    "GenerateOptions",
    "MambaShape",
    "MemoryTarget",
    "MlpShape",
    "Mode",
    "ModelShape",
    "MoeShape",
    "NamedTensors",
    "ParallelContext",
    "PlanError",
    "Recipe",
    "Sampling",
    "SubmodelPlan",
    "UnsupportedError",
    "active_params",
    "build_model",
    "build_space",
    "cost_function",
    "elasticize",
    "extract",
    "find_model_checkpoint",
    "flops_per_token",
    "generate",
    "load_checkpoint",
    "load_model",
    "load_recipe",
    "memory_bytes",
    "nearest_plan",
    "open_checkpoint",
    "parent_plan",
    "plan_cost",
    "resize",
    "save_checkpoint",
    "soft_decision",
    "total_params",
    "weight_bytes",
    "widths_of",
    "write_named",
    "write_submodel",
]

_HOMES = {
    "axes": (
        "AxisSpec",
        "ElasticAxis",
        "ElasticSpace",
        "SubmodelPlan",
    ),
    "checkpoint.files": (
        "CheckpointInfo",
        "find_model_checkpoint",
        "open_checkpoint",
    ),
    "checkpoint.named": (
        "NamedTensors",
        "write_named",
    ),
    "checkpoint.sharded.load": ("load_checkpoint",),
    "checkpoint.sharded.save": ("save_checkpoint",),
    "config": ("load_recipe",),
    "cost": (
        "active_params",
        "cost_function",
        "flops_per_token",
        "total_params",
        "weight_bytes",
        "widths_of",
    ),
    "elastic.attach": (
        "ElasticHandle",
        "elasticize",
    ),
    "elastic.decision": (
        "Decision",
        "Mode",
        "soft_decision",
    ),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "ElasticError",
        "PlanError",
        "UnsupportedError",
    ),
    "export.extract": ("extract",),
    "export.generate": (
        "Continuation",
        "GenerateOptions",
        "generate",
    ),
    "export.load": ("load_model",),
    "export.sampling": ("Sampling",),
    "export.write": ("write_submodel",),
    "memory": (
        "MemoryTarget",
        "memory_bytes",
    ),
    "models.build": ("build_model",),
    "parallel": ("ParallelContext",),
    "planning": (
        "nearest_plan",
        "plan_cost",
    ),
    "recipe": ("Recipe",),
    "shape": (
        "AttentionShape",
        "MambaShape",
        "MlpShape",
        "ModelShape",
        "MoeShape",
    ),
    "space": (
        "AxisChoices",
        "build_space",
        "parent_plan",
        "resize",
    ),
}
"""Module -> the public names it holds."""


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562). Raises AttributeError for any other."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is there, the public names that nobody has asked for yet included."""
    return sorted({*globals(), *__all__})
