"""GGUF files, read through transformers: a file becomes the Hugging Face directory that it was made from, de-quantised to fp32.

transformers reads the tensors (names, rotary order, de-quantisation). It is not trusted with the rest: what a file says and transformers
leaves out - rotary scaling, sliding windows, biases of an architecture that has none - would go missing without a word, and a tensor
that a file lacks would be drawn at random. So the keys of a file are read here, each by name, and every tensor of the file must have found
its place. The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from megatron_elastic.errors import CheckpointError, UnsupportedError, raise_all
from megatron_elastic.hf.bars import without_bars
from megatron_elastic.hf.card import card_header
from megatron_elastic.hf.gguf_tokenizer import TokenizerKeys, save_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig, PreTrainedModel

_NEEDS = 'reading GGUF files needs the packages transformers, gguf and accelerate; run: pip install "megatron-elastic[hf,gguf]"'

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_MOE_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LICENCE_KEYS = {"general.license": "license", "general.license.name": "license_name", "general.license.link": "license_link"}
"""GGUF key -> key of a model card."""
_NEUTRAL: dict[str, Any] = {"rope.scaling.type": "none"}
"""Keys without a setting of their own, and the one value that changes nothing."""


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    """As in config.json."""
    keys: dict[str, str]
    """GGUF key without its prefix -> key of config.json."""
    fixed: dict[str, Any]
    """Settings that llama.cpp takes for granted and the config class does not."""


_ARCHITECTURES = {
    # Mistral's files call themselves llama, too; without a sliding window the two are the same.
    "llama": _Architecture("llama", _KEYS, {}),
    "qwen2": _Architecture("qwen2", _KEYS, {}),
    "qwen3": _Architecture("qwen3", _KEYS, {}),
    # llama.cpp/src/models/qwen3moe.cpp divides the chosen experts' weights by their sum.
    "qwen3moe": _Architecture("qwen3_moe", {**_KEYS, **_MOE_KEYS}, {"norm_topk_prob": True}),
}


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` names: the file itself, or the only one of a directory. None when it names none.

    Raises CheckpointError when a directory holds several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: several GGUF files ({names}); name one of them")
    return files[0] if files else None


def convert_gguf(source: Path, directory: Path) -> None:
    """Write into `directory` what a Hugging Face directory of the model in `source` holds.

    That is config.json, fp32 safetensors, generation_config.json, the tokenizer where the file has one, and a README.md with the licence
    where the file names it. The whole model is held in memory. No code but that of the installed packages runs.

    source: a GGUF file. directory: exists and is empty; whoever made it removes it when this fails.
    Raises UnsupportedError for missing packages, an architecture, a key or a tokenizer that is not supported, CheckpointError for a file that is
    not GGUF, damaged, incomplete or one part of several, OSError when the disk does not take what is written.
    """
    reader = _open(source)
    fields = {name: _shortest(field.contents()) for name, field in reader.fields.items()}
    if fields.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{source}: one of {fields['split.count']} parts of a model; join them first with llama.cpp's llama-gguf-split --merge"
        )
    architecture = _architecture(source, fields)
    tokenizer = TokenizerKeys.read(fields)
    tokenizer.check(source)
    config = _config(source, fields, architecture, reader, tokenizer.special_ids())
    try:
        with without_bars():  # one is left, of the long part: the de-quantisation draws its own
            model = _load(source, fields["general.architecture"], config, reader)
            model.save_pretrained(directory)
        save_tokenizer(tokenizer, directory, max_length=config.max_position_embeddings)
        if licence := {ours: fields[theirs] for theirs, ours in _LICENCE_KEYS.items() if theirs in fields}:
            (directory / "README.md").write_text(card_header(licence), encoding="utf-8")
    except SafetensorError as error:  # its word for every error of a disk
        raise OSError(_line(error)) from None


def _open(source: Path) -> GGUFReader:
    try:
        import accelerate  # noqa: F401 - transformers reads no GGUF without it
        import transformers  # noqa: F401
        from gguf import GGUFReader
    except ImportError:
        raise UnsupportedError(f"{source}: {_NEEDS}") from None
    try:
        with source.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise CheckpointError(f"{source}: not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:  # what reading past the end or nonsense comes to
        raise CheckpointError(f"{source}: truncated or damaged GGUF file ({_line(error)}); fetch it again") from None


def _line(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())


def _shortest(value: Any) -> Any:
    """A number that was rounded to fp32 as it was written before: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _architecture(source: Path, fields: dict[str, Any]) -> _Architecture:
    name = fields.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedError(
            f"{source}: general.architecture {name!r} is not supported, only {known}; import another format of the model"
        )
    return _ARCHITECTURES[name]


def _config(
    source: Path, fields: dict[str, Any], architecture: _Architecture, reader: GGUFReader, special_ids: dict[str, int]
) -> PretrainedConfig:
    """The config that the file's keys amount to.

    Raises UnsupportedError for every key that cannot be honoured and for a model that transformers' class of the architecture cannot be,
    CheckpointError for what is missing or no size.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    values = _settings(source, fields, architecture)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    prefix = fields["general.architecture"] + "."
    missing = [f"no key {prefix}{key}" for key in architecture.keys if architecture.keys[key] not in _DERIVED | set(values)]
    missing += ["no tensor token_embd.weight"] if "token_embd.weight" not in tensors else []
    raise_all(CheckpointError, missing, f"{source}: incomplete GGUF file")
    # What llama.cpp takes where a key is missing (llama.cpp/src/llama-model.cpp, load_hparams).
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    values.setdefault("rope_theta", 10000.0)
    values["vocab_size"] = int(tensors["token_embd.weight"].shape[1])  # GGUF counts axes from the fastest one
    values["tie_word_embeddings"] = "output.weight" not in tensors
    try:
        return AutoConfig.for_model(architecture.model_type, **values, **architecture.fixed, **special_ids)
    except StrictDataclassError as error:
        raise UnsupportedError(
            f"{source}: transformers has no such {architecture.model_type} model: {_line(error)}; import another format of the model"
        ) from None


def _settings(source: Path, fields: dict[str, Any], architecture: _Architecture) -> dict[str, Any]:
    """Key of config.json -> value, for the keys of the architecture. Raises as `_config` does."""
    prefix = fields["general.architecture"] + "."
    values: dict[str, Any] = {}
    problems, wrong = [], []
    for name, value in fields.items():
        key = name.removeprefix(prefix)
        if key == name or _NEUTRAL.get(key) == value:
            continue
        setting = architecture.keys.get(key)
        if setting is None:
            problems.append(f"key {name} = {value!r} is not supported")
        elif isinstance(value, list):
            problems.append(f"{name} has a value per layer; layers that differ are not supported")
        elif not isinstance(value, int | float) or not value > 0:
            wrong.append(f"{name} = {value!r} is not a number above 0")
        elif values.setdefault(setting, value) != value:
            problems.append(
                f"{name} = {value!r} and another key that means {setting} = {values[setting]!r} differ; partial rotary is not supported"
            )
    raise_all(UnsupportedError, problems, str(source))
    raise_all(CheckpointError, wrong, str(source))
    return values


_DERIVED = {"head_dim", "rope_theta", "vocab_size"}
"""Settings that follow from others where their key is missing."""


def _load(source: Path, architecture: str, config: PretrainedConfig, reader: GGUFReader) -> PreTrainedModel:
    """The model with the file's tensors; `architecture` is GGUF's name of it. Raises CheckpointError unless they and its parameters are the same set."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    places = set(get_gguf_hf_weights_map(model, processor)) - ({"output.weight"} if config.tie_word_embeddings else set())
    places = {name if name.endswith((".weight", ".bias")) else f"{name}.weight" for name in places}  # stacked experts come without
    names = {tensor.name for tensor in reader.tensors}
    strangers = [f"tensor {name} has no place in a {config.model_type} model" for name in sorted(names - places)]
    raise_all(UnsupportedError, strangers, str(source))
    raise_all(CheckpointError, [f"tensor {name} is missing" for name in sorted(places - names)], str(source))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are reported below, all of them
            output_loading_info=True,
        )
    except NotImplementedError as error:  # a quantisation that the gguf package cannot undo
        raise UnsupportedError(f"{source}: {error}; convert the file to another one first, for example Q8_0") from None
    except (ValueError, RuntimeError) as error:  # rows that its heads do not divide
        raise CheckpointError(f"{source}: its tensors do not fit its keys: {_line(error)}; fetch it again") from None
    model, found = loaded
    assert not found["missing_keys"], "every tensor has its place"
    problems = [f"tensor {name} has shape {list(has)} instead of {list(wants)}" for name, has, wants in sorted(found["mismatched_keys"])]
    raise_all(CheckpointError, problems, f"{source}: its tensors do not fit its keys")
    return model
