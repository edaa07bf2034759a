"""How the tensors of a Hugging Face checkpoint follow from ours, and ours from them: one rule a parameter, mechanics once.

Our names and shapes are those of `layout.full_shapes`: query, key and value fused and interleaved by KV group, both halves of a gated MLP in one
matrix, routed experts stacked, the vocabulary padded. Theirs have one tensor for each of these, and one MLP an expert. A rule says which names
belong together and how a tensor of ours splits into theirs; joining undoes the split bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_elastic.errors import CheckpointError, raise_all
from megatron_elastic.layout import full_shapes, layer_of
from megatron_elastic.shape import LAYER_KINDS, ModelShape

EXPERT = "{expert}"
"""Stands for an expert's number in a name."""
_SHOWN = 8
"""How many problems a message lists."""


@dataclass(frozen=True, slots=True)
class Transform:
    """split(tensor of ours, shape) -> tensors of theirs, in the order of the rule's names (experts outermost); join undoes it.

    The shape has the sizes of the tensor's own layer. split works on meta tensors too, which is how shapes of theirs are known.
    """

    split: Callable[[Tensor, ModelShape], list[Tensor]]
    join: Callable[[list[Tensor], ModelShape], Tensor]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of ours. ours, theirs: names after the prefix of a layer, or whole names for parameters outside the layers.

    part: the sublayer it belongs to, as `LAYER_KINDS` names it; "" outside the layers.
    """

    part: str
    ours: str
    theirs: tuple[str, ...]
    how: Transform


def _split_qkv(fused: Tensor, shape: ModelShape) -> list[Tensor]:
    groups, each, channels = _qkv_sizes(shape)
    by_group = fused.unflatten(0, (groups, each, channels))  # each group: its query heads, its key head, its value head
    return [by_group[:, :-2].flatten(0, 2), by_group[:, -2].flatten(0, 1), by_group[:, -1].flatten(0, 1)]


def _join_qkv(parts: list[Tensor], shape: ModelShape) -> Tensor:
    groups, _, channels = _qkv_sizes(shape)
    return torch.cat([part.unflatten(0, (groups, -1, channels)) for part in parts], 1).flatten(0, 2)


def _qkv_sizes(shape: ModelShape) -> tuple[int, int, int]:
    """KV groups, heads of one group (queries, key, value), channels of a head."""
    attention = shape.attention
    assert attention is not None and isinstance(attention.heads, int)
    return attention.kv_groups, attention.heads // attention.kv_groups + 2, attention.head_dim


def _split_rows(padded: Tensor, shape: ModelShape) -> list[Tensor]:
    return [padded[: shape.vocab_size]]


def _join_rows(parts: list[Tensor], shape: ModelShape) -> Tensor:
    (words,) = parts
    if shape.vocab_rows == shape.vocab_size:
        return words
    return torch.cat([words, words.new_zeros((shape.vocab_rows - shape.vocab_size, *words.shape[1:]))])


def _split_experts(stacked: Tensor, shape: ModelShape) -> list[Tensor]:
    return list(stacked)


def _join_experts(parts: list[Tensor], shape: ModelShape) -> Tensor:
    return torch.stack(parts)


def _split_gated_experts(stacked: Tensor, shape: ModelShape) -> list[Tensor]:
    return [half for expert in stacked for half in expert.chunk(2)]


def _join_gated_experts(parts: list[Tensor], shape: ModelShape) -> Tensor:
    return torch.stack([torch.cat(parts[at : at + 2]) for at in range(0, len(parts), 2)])


WHOLE = Transform(lambda tensor, shape: [tensor], lambda parts, shape: parts[0])
"""The same tensor under another name."""
WORDS = Transform(_split_rows, _join_rows)
"""Rows of the vocabulary: theirs has no padding, ours is padded with zeros."""
QKV = Transform(_split_qkv, _join_qkv)
"""Query, key and value [heads x channels, ...], fused by KV group in ours."""
HALVES = Transform(lambda tensor, shape: list(tensor.chunk(2)), lambda parts, shape: torch.cat(parts))
"""The two first matrices of a gated MLP: the one that is activated, and the other."""
EXPERTS = Transform(_split_experts, _join_experts)
"""One matrix an expert."""
GATED_EXPERTS = Transform(_split_gated_experts, _join_gated_experts)
"""Two first matrices an expert."""


@dataclass(frozen=True, slots=True)
class NameMap:
    """The rules of a family of models, and where it puts its layers ("model.layers.{layer}.").

    others: a name outside the layers -> another that some writer gives the same tensor.
    """

    layers: str
    rules: tuple[Rule, ...]
    others: Mapping[str, str] = field(default_factory=dict)

    def spelled(self, stored: Container[str]) -> NameMap:
        """These rules with the names that are `stored` where a writer used another one."""
        used = {name: other for name, other in self.others.items() if other in stored}
        return replace(self, rules=tuple(replace(r, theirs=tuple(used.get(name, name) for name in r.theirs)) for r in self.rules))

    def names(self, name: str, shape: ModelShape) -> list[str]:
        """Their names of our parameter `name`, in the order in which its transform splits it. Raises CheckpointError when no rule has it."""
        rule, layer = self._rule(name, shape)
        prefix = "" if layer is None else self.layers.format(layer=layer)
        if EXPERT not in rule.theirs[0]:
            return [prefix + theirs for theirs in rule.theirs]
        own = shape.at(layer or 0).moe
        assert own is not None and isinstance(own.experts, int)
        return [prefix + theirs.replace(EXPERT, str(expert)) for expert in range(own.experts) for theirs in rule.theirs]

    def split(self, name: str, tensor: Tensor, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
        """Their (name, tensor) of one tensor of ours; views of it where that is possible."""
        rule, layer = self._rule(name, shape)
        yield from zip(self.names(name, shape), rule.how.split(tensor, _own(shape, layer)), strict=True)

    def join(self, name: str, parts: list[Tensor], shape: ModelShape) -> Tensor:
        """Our tensor `name` from theirs, in the order of `names`."""
        rule, layer = self._rule(name, shape)
        return rule.how.join(parts, _own(shape, layer))

    def shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Every tensor of theirs with its shape, in the order of ours. Raises CheckpointError naming every parameter that they do not have."""
        found: dict[str, tuple[int, ...]] = {}
        for name, size in full_shapes(shape).items():
            found |= {theirs: tuple(part.shape) for theirs, part in self.split(name, torch.empty(size, device="meta"), shape)}
        return found

    def _rule(self, name: str, shape: ModelShape) -> tuple[Rule, int | None]:
        layer = layer_of(name)
        parts = ("",) if layer is None else LAYER_KINDS[shape.layer_pattern[layer]]
        plain = name if layer is None else name.removeprefix(f"decoder.layers.{layer}.")
        for rule in self.rules:
            if rule.ours == plain and rule.part in parts:
                return rule, layer
        raise CheckpointError(f"{name} has no place in a Hugging Face checkpoint of this family; choose another one")


def _own(shape: ModelShape, layer: int | None) -> ModelShape:
    return shape if layer is None else shape.at(layer)


def to_theirs(names: NameMap, shape: ModelShape, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Our named tensors as theirs, one of ours at a time."""
    for name, tensor in tensors:
        yield from names.split(name, tensor, shape)
        del tensor  # it would be held while the next one is read


class OurTensors(Mapping[str, Tensor]):
    """A Hugging Face checkpoint under our names: a tensor is read and joined each time it is asked for.

    theirs: name -> tensor. stored: name -> shape of every tensor there is, for one look at all of them before anything is read.
    unused: whether a name that the model does not need may be there all the same.
    Raises CheckpointError naming every tensor that is missing, too many or of another shape than the model of `shape` has.
    """

    def __init__(
        self,
        names: NameMap,
        shape: ModelShape,
        theirs: Mapping[str, Tensor],
        stored: Mapping[str, tuple[int, ...]],
        unused: Callable[[str], bool],
    ) -> None:
        self._names, self._shape, self._theirs, self._ours = names, shape, theirs, full_shapes(shape)
        wanted = names.shapes(shape)
        problems = [f"{name} is missing" for name in wanted if name not in stored]
        problems += [f"{name} is not one of the model's tensors" for name in stored if name not in wanted and not unused(name)]
        problems += [
            f"{name} has shape {list(stored[name])}, config.json needs {list(size)}"
            for name, size in wanted.items()
            if name in stored and tuple(stored[name]) != size
        ]
        if len(problems) > _SHOWN:  # one wrong size is wrong in every layer
            problems = [*problems[:_SHOWN], f"and {len(problems) - _SHOWN} more"]
        raise_all(CheckpointError, problems, "config.json and weights disagree")

    def __getitem__(self, name: str) -> Tensor:
        """Our full tensor `name`. Raises KeyError for a name the model has not, CheckpointError for a weight that is NaN or infinite."""
        if name not in self._ours:
            raise KeyError(name)
        parts = []
        for theirs in self._names.names(name, self._shape):
            parts.append(self._theirs[theirs])
            check_finite(theirs, parts[-1])
        return self._names.join(name, parts, self._shape)

    def __iter__(self) -> Iterator[str]:
        """Our names, without reading anything."""
        return iter(self._ours)

    def __len__(self) -> int:
        """How many tensors of ours there are."""
        return len(self._ours)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError when a weight is NaN or infinite, naming the tensor and how many are."""
    # One pass without a copy: NaN is both the least and the greatest.
    if tensor.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(f"{name}: {bad} of {tensor.numel()} weights are NaN or infinite; get the checkpoint again")
