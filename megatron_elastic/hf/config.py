"""The keys of a config.json, read one by one, so that none is overlooked: what nobody asked for is refused by name.

Hugging Face leaves out keys that have their family's default, spells some in two ways, and files its users' habits beside what decides the
model. A reader therefore says for each key what it means here: a size, a value that must be as it is, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_elastic.errors import CheckpointError, ConfigError, raise_all

CONFIG = "config.json"

NUMBER = (int, float)
"""A number, whole or not."""

MEANINGLESS = frozenset(
    (
        *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures", "auto_map", "dtype"),
        *("model_type", "name_or_path", "tokenizer_class", "torch_dtype"),
        *(
            "bos_token_id",
            "eos_token_id",
            "id2label",
            "is_encoder_decoder",
            "label2id",
            "num_logits_to_keep",
            "pad_token_id",
            "problem_type",
        ),
        *("attention_dropout", "gradient_checkpointing", "hidden_dropout", "router_aux_loss_coef", "router_jitter_noise"),
        *("chunk_size_feed_forward", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"),
        *("is_llama_config", "pretraining_tp", "quantization_config", "rope_interleaved", "transformers.js_config", "transformers_version"),
        *("unsloth_fixed", "unsloth_version", "use_mamba_kernels"),
    )
)
"""Keys that change neither weights nor logits of a model in evaluation: habits, training, bookkeeping. `quantization_config` is looked at first."""
NEUTRAL_WHEN_FALSE = frozenset(
    (
        # What a model of these families might have had and has not.
        *("attention_bias", "bias", "mlp_bias", "num_nextn_predict_layers", "qkv_bias", "shared_expert_intermediate_size"),
        *("use_bias", "use_mrope", "use_qk_norm", "use_sliding_window"),
        # What transformers 4 wrote of every model: how to generate, and kinds of models that these are not.
        *("add_cross_attention", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "is_decoder", "min_length"),
        *("no_repeat_ngram_size", "diversity_penalty", "output_scores", "remove_invalid_values", "return_dict_in_generate"),
        *("tf_legacy_loss", "tie_encoder_decoder", "torchscript", "use_bfloat16"),
        # What training drops.
        *("attn_pdrop", "embd_pdrop", "embedding_dropout", "mlp_dropout", "resid_pdrop"),
        # Which kernels compute the same.
        *("_flash_attn_2_enabled", "use_flash_attn"),
    )
)
"""Keys that published configs carry with false or 0, where no reader of these families makes anything of it. Any other value is refused."""


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a directory. Raises CheckpointError when it is missing or no JSON object."""
    file = directory / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{str(directory)!r} has no {CONFIG}; give the directory of a model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error}; get the file again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{str(file)!r} is not a JSON object; get the file again")
    return config


class CannotSay(Exception):
    """A part of a shape that a family's config.json has no key for."""


class ConfigKeys:
    """The keys of a config.json while a family reads them.

    `take` and `demand` read a key and note that it was; `close` refuses what nobody read, all at once with everything else that was wrong.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._given, self._config = config, {**defaults, **config}
        self._read: set[str] = set()
        self._problems: list[str] = []

    def take(self, *names: str, default: Any = None, kind: type | tuple[type, ...] = int) -> Any:
        """The value of the first of `names` that is there and not null, else `default`. kind: the type it must have; a number must be above 0."""
        self._read.update(names)
        found = {name: self._config[name] for name in names if self._config.get(name) is not None}
        if not found:
            return default
        name, value = next(iter(found.items()))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            self._problems.append(f"{name} {_short(value)} is not of type {kinds}; mend it")
            return default
        if any(other != value for other in found.values()):
            self._problems.append(
                f"{' and '.join(f'{name} {_short(value)}' for name, value in found.items())} contradict each other; remove one"
            )
        if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
            self._problems.append(f"{name} {value} must be above 0")
            return default
        return value

    def require(self, *names: str, kind: type | tuple[type, ...] = int, otherwise: Any = 1) -> Any:
        """A key without which there is no model. What is wrong with it is noted, and `otherwise` returned so that reading goes on."""
        before = len(self._problems)
        value = self.take(*names, kind=kind)
        if value is None and len(self._problems) == before:
            self._problems.append(f"{names[0]} is missing")
        return otherwise if value is None else value

    def given(self, name: str) -> bool:
        """Whether config.json itself has the key, rather than its family's default."""
        return self._given.get(name) is not None

    def demand(self, name: str, allowed: Any, *, default: Any, what: str) -> None:
        """Note a problem when a key has another value than `allowed` (or than any of a tuple of them). what: why, for the message."""
        self._read.add(name)
        value = self._config.get(name)
        value = default if value is None else value
        if value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
            self._problems.append(f"{name} {_short(value)} is not supported: {what}")

    def ignore(self, *names: str) -> None:
        """Keys that mean nothing for this family's logits."""
        self._read.update(names)

    def problem(self, line: str) -> None:
        """Note something that is wrong with several keys together."""
        self._problems.append(line)

    def close(self) -> None:
        """Raise ConfigError listing everything that was noted, and every key that is set and was not read."""
        if self._config.get("quantization_config"):
            self._problems.append("quantization_config: quantised weights are not read; give the model in bf16, fp16 or fp32")
        # transformers asks every family's config for this key; false and null both let words see what follows them.
        if self._given.get("is_causal", True) is not True:
            self._problems.append(
                f"is_causal {_short(self._given['is_causal'])} is not supported: attention to words that follow; choose a model without it"
            )
        known = self._read | MEANINGLESS | {"is_causal"}
        unknown = [
            f"{name} {_short(value)} is not known here, so that the model might be another; choose a model without it"
            for name, value in self._given.items()
            if name not in known and not _says_nothing(name, value)
        ]
        raise_all(ConfigError, self._problems + unknown, CONFIG)


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a key that nobody read leaves the model as it is; false of any key is not enough: it may switch off what every model has."""
    return value is None or value in ([], {}) or (name in NEUTRAL_WHEN_FALSE and value in (False, 0))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
