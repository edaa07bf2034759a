"""The families of Hugging Face models that are read and written: for each its config.json, its names, and the shape both mean.

| family | model_type | what sets it apart |
|---|---|---|
| Llama | llama | biases everywhere in attention and MLP, or nowhere; Llama 3's scaled rotations |
| Mistral | mistral | no biases; sliding windows are refused |
| Qwen2 | qwen2 | biases of query, key and value |
| Qwen3 | qwen3 | norms of queries and keys, head by head |
| Qwen3-MoE | qwen3_moe | softmax router, single layers dense |
| Mixtral | mixtral | softmax over the chosen experts |
| NemotronH | nemotron_h | Mamba-2, attention, MLP and MoE layers in any order; sigmoid router with a selection bias |

`Family.read` turns a config.json into a ModelShape or refuses it by name; `Family.write` is its inverse, and what a family cannot say of a
shape is whatever does not come back (`Family.problems`), so that the two can never drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_elastic.config import to_plain
from megatron_elastic.errors import ConfigError, UnsupportedError, raise_all
from megatron_elastic.hf import decoders, nemotron
from megatron_elastic.hf.config import CONFIG, CannotSay, ConfigKeys
from megatron_elastic.hf.rules import NameMap
from megatron_elastic.recipe_files import flatten
from megatron_elastic.shape import PARTS, ModelShape

_NOT_SAID = ("moe.aux_loss", "moe.z_loss", "padded_vocab_size")
"""Entries of a shape that no config.json has: they matter in training only, and padding is not written."""
_Read = Callable[[ConfigKeys], ModelShape]
_Write = Callable[[ModelShape], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of Hugging Face model.

    architecture: the class that transformers loads it with. defaults: what a key means that config.json leaves out, as that class has it.
    """

    model_type: str
    architecture: str
    names: NameMap
    read_shape: _Read
    write_keys: _Write
    defaults: Mapping[str, Any]

    def read(self, config: Mapping[str, Any]) -> ModelShape:
        """The shape of a config.json. Raises ConfigError naming everything in it that is not supported."""
        keys = ConfigKeys(config, self.defaults)
        shape = self.read_shape(keys)
        keys.close()
        raise_all(ConfigError, shape.problems(), CONFIG)
        return shape

    def write(self, shape: ModelShape) -> dict[str, Any]:
        """The keys of config.json that say what the shape is. Raises UnsupportedError for a shape this family cannot say."""
        if problems := self.problems(shape):
            raise UnsupportedError(f"a {self.model_type} config cannot say {'; '.join(problems)}", problems)
        return self._keys(shape)

    def problems(self, shape: ModelShape) -> list[str]:
        """What a config.json of this family cannot say of a shape, one line each."""
        if not shape.homogeneous:
            sizes = [key for key, value in flatten(to_plain(shape)).items() if isinstance(value, list)]
            return [f"sizes that differ from layer to layer (model.{', model.'.join(sizes)})"]
        try:
            back = _plain(self.read(self._keys(shape)))
        except (ConfigError, CannotSay) as error:
            return [str(error)]
        wanted = _plain(shape)
        keys = [key for key in {**wanted, **back} if key not in _NOT_SAID and wanted.get(key) != back.get(key)]
        return [f"model.{key} {wanted.get(key)!r} (it would say {back.get(key)!r})" for key in keys]

    def _keys(self, shape: ModelShape) -> dict[str, Any]:
        return {"model_type": self.model_type, "architectures": [self.architecture], **self.write_keys(shape)}


def _plain(shape: ModelShape) -> dict[str, Any]:
    """A shape as dotted keys, without the parts that no layer has; gates that are not scaled are scaled by 1."""
    shape = replace(shape, **{part: None for part in PARTS if not shape.has(part)})
    if shape.moe and shape.moe.scaling_factor is None:
        shape = replace(shape, moe=replace(shape.moe, scaling_factor=1.0))
    return flatten(to_plain(shape))


def _decoder(model_type: str, architecture: str, names: NameMap, read: _Read, write: _Write) -> Family:
    return Family(model_type, f"{architecture}ForCausalLM", names, read, write, decoders.DEFAULTS[model_type])


FAMILIES: tuple[Family, ...] = (
    _decoder("llama", "Llama", decoders.DENSE, decoders.read_llama, decoders.write_llama),
    _decoder("mistral", "Mistral", decoders.DENSE, decoders.read_mistral, decoders.write_mistral),
    _decoder("qwen2", "Qwen2", decoders.DENSE, decoders.read_qwen2, decoders.write_qwen),
    _decoder("qwen3", "Qwen3", decoders.DENSE, decoders.read_qwen3, decoders.write_qwen),
    _decoder("qwen3_moe", "Qwen3Moe", decoders.QWEN_EXPERTS, decoders.read_qwen3_moe, decoders.write_qwen3_moe),
    _decoder("mixtral", "Mixtral", decoders.MIXTRAL, decoders.read_mixtral, decoders.write_mixtral),
    Family("nemotron_h", "NemotronHForCausalLM", nemotron.NAMES, nemotron.read_nemotron, nemotron.write_nemotron, nemotron.DEFAULTS),
)
"""Every family; of several that can say a shape, the first is chosen."""


def family_of_config(config: Mapping[str, Any]) -> Family:
    """The family of a config.json by its model_type. Raises UnsupportedError for any other."""
    kind = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == kind:
            return family
    raise UnsupportedError(
        f"config.json: model_type {kind!r} is not supported; choose a model of {', '.join(f.model_type for f in FAMILIES)}"
    )


def family_of_shape(shape: ModelShape, wanted: str | None = None, *, holds_family: bool = True) -> Family:
    """The family to write a model as: the one that is wanted, or the first that can say the shape.

    holds_family: whether the model's source holds the family it was cut from, which a member that was extracted with a width per layer does not.
    Raises UnsupportedError when there is none, with what each family cannot say.
    """
    known = {family.model_type: family for family in FAMILIES}
    if wanted is not None and wanted not in known:
        raise UnsupportedError(f"family {wanted!r} is not supported; choose one of {', '.join(known)}")
    reasons = {kind: family.problems(shape) for kind, family in known.items() if wanted in (None, kind)}
    if said := [kind for kind, problems in reasons.items() if not problems]:
        return known[said[0]]
    if wanted is not None and shape.homogeneous:
        raise UnsupportedError(
            f"a {wanted} config cannot say {'; '.join(reasons[wanted])}; choose another family, or none", reasons[wanted]
        )
    if not shape.homogeneous:
        (line, *_), *_ = reasons.values()
        remedy = "add --homogenise" if holds_family else "extract it again from its family with --homogenise"
        raise UnsupportedError(f"no Hugging Face config can say {line}; {remedy}, or write a megatron checkpoint")
    lines = [f"{kind} cannot say {'; '.join(problems)}" for kind, problems in reasons.items()]
    raise UnsupportedError("\n  - ".join(["this model has no Hugging Face family; write a megatron checkpoint:", *lines]), lines)
