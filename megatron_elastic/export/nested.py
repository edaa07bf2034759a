"""elastic.json: what makes a Hugging Face directory of a parent a family. The weights beside it are the parent's, all members inside.

`transformers` loads the directory as the parent and does not look at the file; `extract` cuts any member out of it without the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic.axes import ElasticAxis, ElasticSpace, SubmodelPlan
from megatron_elastic.checkpoint.files import decode_space, plain_space
from megatron_elastic.errors import CheckpointError, ConfigError, PlanError
from megatron_elastic.formats import NESTED
from megatron_elastic.shape import ModelShape
from megatron_elastic.space import AxisChoices, build_space

ELASTIC_FILE = "elastic.json"
PROVENANCE = ("parent", "license", "data")
"""What is said about where a family comes from; each may be null."""


@dataclass(frozen=True, slots=True)
class Nested:
    """A family: its axes, budget -> plan, and where it comes from (parent, license, data: what the cards of its members say)."""

    space: ElasticSpace
    plans: Mapping[str, SubmodelPlan]
    provenance: Mapping[str, Any]


def write_nested(directory: Path, family: Nested) -> None:
    """Write elastic.json into a directory of the parent's weights."""
    plans = {name: plan.to_dict() for name, plan in family.plans.items()}
    data = {**NESTED.stamp, "space": plain_space(family.space), "plans": plans, "provenance": family.provenance}
    (directory / ELASTIC_FILE).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_nested(directory: Path, shape: ModelShape) -> Nested | None:
    """The family in a directory of the weights of a model of `shape`; None without an elastic.json.

    Raises CheckpointError for one that cannot be understood or whose plans do not fit the model.
    """
    file = directory / ELASTIC_FILE
    if not file.is_file():
        return None
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        NESTED.check(data, str(file))
        space = decode_space(data["space"], shape)
        plans = {name: SubmodelPlan.from_dict(plan) for name, plan in data["plans"].items()}
        provenance = {name: data["provenance"][name] for name in PROVENANCE}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, PlanError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be understood ({error!r}); export the family again") from None
    try:
        _check_space(space, shape)
        plans = {name: space.completed(plan) for name, plan in plans.items()}
        for plan in plans.values():
            space.check(plan)
    except (ConfigError, PlanError, TypeError) as error:
        raise CheckpointError(f"{str(file)!r} is not of the model beside it: {error}") from None
    return Nested(space, plans, provenance)


def _check_space(space: ElasticSpace, shape: ModelShape) -> None:
    """Raise ConfigError when a recipe could not make this space of the model: groups decide which weights a width keeps."""
    numbers = [space.shard_groups, *space.drop_order, *(n for spec in space.axes for n in (*spec.choices, spec.groups))]
    if not all(type(number) is int for number in numbers) or space.shard_groups < 1:
        raise ConfigError("its widths, groups and layers are not whole numbers")
    experts = space.spec(ElasticAxis.EXPERTS)
    made = build_space(
        shape,
        {spec.axis: AxisChoices(choices=spec.choices, per_layer=spec.per_layer) for spec in space.axes},
        shard_groups=space.shard_groups,
        num_expert_groups=None if experts is None else experts.groups,
        drop_order=space.drop_order,
    )
    if made != space:
        raise ConfigError("its axes have other groups or layers than the model's")
