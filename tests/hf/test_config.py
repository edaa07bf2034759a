"""Proves that config.json of public models means the model that was published, that everything else is refused by its own key and value, and that
a family writes only what it can say.

Run: pytest tests/hf/test_config.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.cost import active_params, total_params, widths_of
from megatron_elastic.errors import CheckpointError, ConfigError, UnsupportedError
from megatron_elastic.hf.config import read_config
from megatron_elastic.hf.families import FAMILIES, family_of_config, family_of_shape
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape
from megatron_elastic.space import parent_plan
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape
from tests.hf.public_configs import PUBLIC
from tests.test_cost import NANO_3, QWEN3_30B, V2_12B

LLAMA, MISTRAL, QWEN2, QWEN3, QWEN_MOE, MIXTRAL, SMOLLM, DENSE, EXPERTS = (config for config, _ in PUBLIC.values())
LLAMA_3: dict[str, Any] = LLAMA["rope_scaling"]


def shape_of(config: dict[str, Any]) -> ModelShape:
    return family_of_config(config).read(config)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_are_read_exactly(name: str) -> None:
    config, params = PUBLIC[name]
    shape = shape_of(json.loads(json.dumps(config)))
    assert total_params(shape, widths_of(parent_plan(shape), shape.num_layers)) == params
    family = family_of_config(config)
    assert family.problems(shape) == [] and family.read(family.write(shape)) == shape
    assert family_of_shape(shape).model_type == ("llama" if family.model_type == "mistral" else family.model_type)


def test_public_models_are_the_shapes_that_are_known() -> None:
    assert replace(shape_of(DENSE), max_sequence_length=131072) == V2_12B
    nano = shape_of(EXPERTS)
    assert nano.moe is not None and nano.moe.scaling_factor == 2.5 and nano.max_sequence_length == 262144
    assert replace(nano, moe=replace(nano.moe, scaling_factor=1.0), max_sequence_length=131072) == NANO_3
    qwen = shape_of(QWEN_MOE)
    assert active_params(qwen, widths_of(parent_plan(qwen), 48)) == active_params(QWEN3_30B, widths_of(parent_plan(QWEN3_30B), 48))
    assert qwen.moe is not None and not qwen.moe.pre_softmax
    assert shape_of(LLAMA).attention == AttentionShape(heads=32, kv_groups=8, head_dim=128, rope_base=5e5, rope_scaling=8.0)
    assert shape_of(SMOLLM).tied_embeddings and not shape_of(LLAMA).tied_embeddings


def test_both_spellings_of_rotations_and_layers_are_one() -> None:
    newer = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rope_scaling")}
    assert shape_of(newer | {"rope_parameters": {**LLAMA_3, "rope_theta": 500000.0}}) == shape_of(LLAMA)
    older = {**{key: value for key, value in LLAMA_3.items() if key != "rope_type"}, "type": "llama3"}
    assert shape_of(LLAMA | {"rope_scaling": older}) == shape_of(LLAMA)
    words = {"M": "linear_attention", "*": "attention", "-": "mlp", "E": "moe"}
    for config in (DENSE, EXPERTS):
        listed = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
        listed["layers_block_type"] = [words[letter] for letter in config["hybrid_override_pattern"]]
        assert shape_of(listed) == shape_of(config)
    assert shape_of(DENSE | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}) == shape_of(DENSE)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in names}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sliding window": (MISTRAL | {"sliding_window": 4096}, "sliding_window 4096 is not supported: attention over a sliding window"),
    "window by default": (without(MISTRAL, "sliding_window"), "sliding_window 4096 is not supported"),
    "window switched on": (
        QWEN2 | {"use_sliding_window": True},
        "use_sliding_window True is not supported: attention over a sliding window",
    ),
    "window of experts": (MIXTRAL | {"sliding_window": 4096}, "sliding_window 4096 is not supported"),
    "layers of two kinds": (
        QWEN3 | {"layer_types": ["full_attention", "sliding_attention"] * 18},
        "layer_types 'sliding_attention' is not supported: every layer must be 'full_attention'",
    ),
    "kinds that are no words": (QWEN3 | {"layer_types": [{"a": 1}]}, "layer_types {'a': 1} is not supported"),
    "attention bias without another": (
        LLAMA | {"attention_bias": True},
        "attention_bias True with mlp_bias False is not supported: both or neither",
    ),
    "attention bias of Qwen3": (QWEN3 | {"attention_bias": True}, "attention_bias True is not supported: a bias of attention alone"),
    "YaRN": (
        QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        "rotary embeddings of type 'yarn' with factor 4.0, {'original_max_position_embeddings': 32768} are not supported",
    ),
    "linear rotations": (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary embeddings of type 'linear' with factor 2.0"),
    "unknown rotations": (LLAMA | {"rope_scaling": {"rope_type": "spiral"}}, "rotary embeddings of type 'spiral'"),
    "other constants of Llama 3": (
        LLAMA | {"rope_scaling": {**LLAMA_3, "low_freq_factor": 2.0}},
        "rotary embeddings of type 'llama3' with factor 8.0",
    ),
    "rotations of each kind of layer": (
        LLAMA | {"rope_scaling": {"full_attention": {"rope_theta": 1e4}}},
        "rotary embeddings of type 'default'",
    ),
    "part of a head": (
        LLAMA | {"partial_rotary_factor": 0.5},
        "partial_rotary_factor 0.5 is not supported: this family rotates whole heads",
    ),
    "part of a head, newer": (
        without(LLAMA, "rope_scaling") | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters: partial_rotary_factor 0.5 is not supported",
    ),
    "two bases": (
        without(LLAMA, "rope_scaling") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "rope_theta 500000.0 and rope_parameters {'rope_type': 'default', 'rope_theta': 10000.0} contradict each other; remove one",
    ),
    "two scalings": (
        LLAMA | {"rope_parameters": {**LLAMA_3, "factor": 32.0}},
        "'factor': 32.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192, 'rope_type': 'llama3'} and rope_scaling",
    ),
    "base that is no number": (
        without(LLAMA, "rope_scaling", "rope_theta") | {"rope_parameters": {"rope_theta": "many"}},
        "rope_parameters: rope_theta 'many' is not a number",
    ),
    "quantised": (
        LLAMA | {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config: quantised weights are not read; give the model in",
    ),
    "words that see what follows": (QWEN2 | {"is_causal": False}, "is_causal False is not supported: attention to words that follow"),
    "words that see what follows, by null": (QWEN3 | {"is_causal": None}, "is_causal None is not supported"),
    "words that see what follows, by 0": (DENSE | {"is_causal": 0}, "is_causal 0 is not supported"),
    "unknown key that is false": (LLAMA | {"use_rope": False}, "use_rope False is not known here, so that the model might be another"),
    "unknown key that is 0": (LLAMA | {"logit_scale": 0}, "logit_scale 0 is not known here"),
    "key that is neutral only when false": (LLAMA | {"use_mrope": True}, "use_mrope True is not known here"),
    "no norms of queries and keys": (QWEN3 | {"use_qk_norm": False}, "use_qk_norm False is not supported: this family has norms"),
    "unknown key": (LLAMA | {"logit_scale": 0.0625}, "logit_scale 0.0625 is not known here, so that the model might be another"),
    "unknown nested key": (LLAMA | {"vision": {"layers": 2}}, "vision {'layers': 2} is not known here"),
    "two numbers of experts": (
        QWEN_MOE | {"num_local_experts": 64},
        "num_experts 128 and num_local_experts 64 contradict each other; remove one",
    ),
    "activation": (LLAMA | {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not supported: activations are silu, relu2, gelu"),
    "no activation": (LLAMA | {"hidden_act": None}, "hidden_act is missing"),
    "wrong type": (LLAMA | {"hidden_size": "4096"}, "hidden_size '4096' is not of type int; mend it"),
    "truth for a number": (LLAMA | {"num_attention_heads": True}, "num_attention_heads True is not of type int"),
    "number for a truth": (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings 1 is not of type bool"),
    "missing": (without(LLAMA, "num_hidden_layers"), "num_hidden_layers is missing"),
    "negative": (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers -1 must be above 0"),
    "no heads": (without(LLAMA, "head_dim") | {"num_attention_heads": 0}, "num_attention_heads 0 must be above 0"),
    "no step": (QWEN_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step 0 must be above 0"),
    "heads that are not shared evenly": (LLAMA | {"num_key_value_heads": 5}, "model.attention.heads 32 is not a multiple of kv_groups 5"),
    "more chosen than there are": (MIXTRAL | {"num_experts_per_tok": 9}, "model.moe.topk 9 is above experts 8"),
    "one expert a token": (MIXTRAL | {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with renormalised gates makes every gate 1"),
    "multi-token prediction": (
        EXPERTS | {"num_nextn_predict_layers": 1},
        "num_nextn_predict_layers 1 is not supported: multi-token prediction heads",
    ),
    "latent experts": (EXPERTS | {"moe_latent_size": 1024}, "moe_latent_size 1024 is not supported: experts on a latent space"),
    "tied hybrid": (
        DENSE | {"tie_word_embeddings": True},
        "tie_word_embeddings True is not supported: transformers does not tie the two matrices",
    ),
    "two shared experts": (EXPERTS | {"n_shared_experts": 2}, "n_shared_experts 2 is not supported: there is one shared expert"),
    "gates that are not renormalised": (
        EXPERTS | {"norm_topk_prob": False},
        "norm_topk_prob False is not supported: megatron-core renormalises",
    ),
    "one gate that is": (EXPERTS | {"num_experts_per_tok": 1}, "norm_topk_prob True is not supported: megatron-core renormalises"),
    "groups ranked by other experts": (
        EXPERTS | {"n_group": 4, "topk_group": 2},
        "num_experts_per_tok 6 with topk_group 2: groups are ranked by",
    ),
    "biases of a hybrid": (DENSE | {"use_bias": True}, "use_bias True is not supported: choose a model without it"),
    "no bias of the convolution": (
        DENSE | {"use_conv_bias": False},
        "use_conv_bias False is not supported: megatron-core's convolution has a bias",
    ),
    "limited time steps": (DENSE | {"time_step_limit": [0.001, 0.1]}, "time_step_limit [0.001, 0.1] is not supported"),
    "number of layers": (DENSE | {"num_hidden_layers": 52}, "num_hidden_layers 52 is not supported: the layers are 'M-M-M-M*-"),
    "letter": (
        EXPERTS | {"hybrid_override_pattern": "MG*", "num_hidden_layers": 3},
        "hybrid_override_pattern 'MG*' is not supported: 'G' is not one of",
    ),
    "letters of another kind": (
        DENSE | {"hybrid_override_pattern": "TT", "num_hidden_layers": 2},
        "hybrid_override_pattern 'TT' is not supported",
    ),
    "kinds of layers": (
        without(DENSE, "hybrid_override_pattern") | {"layers_block_type": ["mlp", 3]},
        "layers_block_type 3 is not supported",
    ),
    "no layers": (
        without(DENSE, "hybrid_override_pattern", "num_hidden_layers"),
        "hybrid_override_pattern is missing, as is layers_block_type",
    ),
    "two orders of layers": (
        DENSE | {"layers_block_type": ["mlp"] * 62},
        "contradict each other; remove one",
    ),
    "two epsilons": (DENSE | {"rms_norm_eps": 1e-6}, "layer_norm_epsilon 1e-05 and rms_norm_eps 1e-06 contradict each other; remove one"),
    "two numbers of key/value heads": (
        DENSE | {"num_query_groups": 4},
        "num_key_value_heads 8 and num_query_groups 4 contradict each other",
    ),
}


HABITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nulls and what is empty": (LLAMA, {"text_config": None, "task_specific_params": {}, "mlp_only_layers": []}),
    "causal": (QWEN2, {"is_causal": True}),
    "biases that other families have": (MISTRAL, {"attention_bias": False, "mlp_bias": False}),
    "Qwen3-Coder": (QWEN_MOE, {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    "transformers 4": (LLAMA, {"add_cross_attention": False, "is_decoder": False, "no_repeat_ngram_size": 0, "torchscript": False}),
}


@pytest.mark.parametrize("case", HABITS)
def test_habits_change_nothing(case: str) -> None:
    config, habits = HABITS[case]
    assert shape_of(config | habits) == shape_of(config)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        shape_of(config)
    assert message in str(caught.value) and str(caught.value).startswith("config.json: ")
    assert len(caught.value.problems) == 1, "one thing is wrong, and one thing is said"


def test_everything_that_is_wrong_is_said_at_once() -> None:
    config = without(LLAMA, "vocab_size") | {"hidden_size": -4, "logit_scale": 2.0, "attention_bias": True, "hidden_act": "swish"}
    with pytest.raises(ConfigError) as caught:
        shape_of(config)
    assert len(caught.value.problems) == 5
    assert all(
        any(word in line for line in caught.value.problems) for word in ("vocab_size", "hidden_size", "logit_scale", "mlp_bias", "swish")
    )


@pytest.mark.parametrize("kind", ["gemma2", "deepseek_v3", "", None, ["llama"]])
def test_other_families_are_refused(kind: Any) -> None:
    with pytest.raises(
        UnsupportedError, match="is not supported; choose a model of llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, nemotron_h"
    ):
        family_of_config({"model_type": kind})


@pytest.mark.parametrize(("text", "message"), [("[1]", "is not a JSON object"), ("{", "cannot be read: "), (None, "has no config.json")])
def test_a_file_that_is_no_config(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def attention(shape: ModelShape, **changes: Any) -> ModelShape:
    assert shape.attention is not None
    return replace(shape, attention=replace(shape.attention, **changes))


def moe(shape: ModelShape, **changes: Any) -> ModelShape:
    assert shape.moe is not None
    return replace(shape, moe=replace(shape.moe, **changes))


PLAIN = attention(tiny_dense(hidden_size=48), qkv_bias=False, qk_norm=False, rope_fraction=1.0)
HYBRID = attention(tiny_shape(), qkv_bias=False)
SOFTMAX = moe(
    attention(tiny_moe(hidden_size=48), qkv_bias=False),
    **{
        "score": "softmax",
        "expert_bias": False,
        "shared_ffn": None,
        "routing_groups": None,
        "groups_per_token": None,
        "scaling_factor": None,
    },
)

CHOSEN: dict[str, tuple[ModelShape, str]] = {
    "plain": (PLAIN, "llama"),
    "scaled rotations": (attention(PLAIN, rope_scaling=8.0), "llama"),
    "biases everywhere": (attention(replace(PLAIN, linear_bias=True), qkv_bias=True), "llama"),
    "hidden that heads do not divide": (replace(PLAIN, hidden_size=40), "mistral"),
    "biases of queries, keys and values": (attention(PLAIN, qkv_bias=True), "qwen2"),
    "norms of queries and keys": (attention(PLAIN, qk_norm=True), "qwen3"),
    "experts with norms": (SOFTMAX, "qwen3_moe"),
    "experts with gates of 1": (moe(SOFTMAX, scaling_factor=1.0), "qwen3_moe"),
    "experts without": (attention(replace(SOFTMAX, layer_pattern="XXXX"), qk_norm=False), "mixtral"),
    "hybrid": (HYBRID, "nemotron_h"),
    "hybrid of two kinds": (replace(HYBRID, layer_pattern="M*M", moe=None, mlp=None), "nemotron_h"),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_the_family_that_can_say_a_shape_is_chosen(case: str) -> None:
    shape, kind = CHOSEN[case]
    family = family_of_shape(shape)
    assert family.model_type == kind and family_of_config(family.write(shape)) is family
    assert family_of_shape(shape, kind) is family


CANNOT: dict[str, tuple[str, ModelShape, str]] = {
    "norms of queries and keys": ("llama", attention(PLAIN, qk_norm=True), "model.attention.qk_norm True (it would say False)"),
    "no norms of queries and keys": ("qwen3", PLAIN, "model.attention.qk_norm False (it would say True)"),
    "LayerNorm": ("llama", replace(PLAIN, normalization="LayerNorm"), "model.normalization 'LayerNorm' with gated True: it has RMSNorm"),
    "not gated": ("mistral", replace(PLAIN, gated=False), "with gated False: it has RMSNorm and a gated MLP"),
    "gated hybrid": ("nemotron_h", replace(HYBRID, gated=True), "with gated True: it has RMSNorm and no gates"),
    "part of a head": ("qwen2", attention(PLAIN, qkv_bias=True, rope_fraction=0.6), "model.attention.rope_fraction 0.6 (it would say 1.0)"),
    "no rotations": ("llama", attention(PLAIN, rope_base=None), "model.attention.rope_base null"),
    "hidden and heads": (
        "llama",
        replace(PLAIN, hidden_size=40),
        "model.hidden_size 40: transformers wants a multiple of attention.heads 12",
    ),
    "layers": ("llama", HYBRID, "model.layer_pattern 'ME*-ME': layers that are not attention and a feed-forward part"),
    "layers of a decoder": ("nemotron_h", PLAIN, "model.layer_pattern 'TTTT': layers of attention with a feed-forward part"),
    "experts": ("qwen3", SOFTMAX, "model.layer_pattern 'TXXX': layers with a mixture of experts"),
    "no experts": ("qwen3_moe", PLAIN, "model.layer_pattern 'TTTT': a model without experts"),
    "dense layers": ("mixtral", SOFTMAX, "model.layer_pattern 'TXXX': layers without experts"),
    "sigmoid": ("qwen3_moe", tiny_moe(), "model.moe.score 'sigmoid' (it would say 'softmax')"),
    "shared expert": ("qwen3_moe", moe(SOFTMAX, shared_ffn=48), "model.moe.shared_ffn 48 (it would say None)"),
    "scaled gates": ("qwen3_moe", moe(SOFTMAX, scaling_factor=2.5), "model.moe.scaling_factor 2.5 (it would say 1.0)"),
    "softmax before the choice": (
        "mixtral",
        attention(moe(replace(SOFTMAX, layer_pattern="XXXX"), pre_softmax=True), qk_norm=False),
        "model.moe.pre_softmax True (it would say False)",
    ),
    "no shared expert": ("nemotron_h", moe(HYBRID, shared_ffn=None), "model.moe.shared_ffn null: it always has a shared expert"),
    "no selection bias": ("nemotron_h", moe(HYBRID, expert_bias=False), "model.moe.expert_bias False (it would say True)"),
    "tied hybrid": ("nemotron_h", replace(HYBRID, tied_embeddings=True), "model.tied_embeddings true: transformers does not tie"),
    "biases of a hybrid": ("nemotron_h", tiny_shape(), "model.attention.qkv_bias True (it would say False)"),
    "groups": (
        "nemotron_h",
        moe(HYBRID, routing_groups=4, groups_per_token=3, topk=3),
        "num_experts_per_tok 3 with topk_group 3: groups are ranked by their two best experts",
    ),
    "sizes of each layer": (
        "llama",
        replace(PLAIN, mlp=MlpShape(ffn=(72, 64, 56, 48))),
        "sizes that differ from layer to layer (model.mlp.ffn)",
    ),
}


@pytest.mark.parametrize("case", CANNOT)
def test_what_a_family_cannot_say_is_named(case: str) -> None:
    kind, shape, message = CANNOT[case]
    family = next(family for family in FAMILIES if family.model_type == kind)
    assert shape.problems() == []
    assert any(message in line for line in family.problems(shape))
    with pytest.raises(UnsupportedError) as caught:
        family.write(shape)
    assert message in str(caught.value) and f"a {kind} config cannot say " in str(caught.value)
    with pytest.raises(UnsupportedError, match=f"a {kind} config cannot say " if shape.homogeneous else "add --homogenise"):
        family_of_shape(shape, kind)


def test_widths_per_layer_have_the_remedy_of_their_source() -> None:
    shape = replace(PLAIN, mlp=MlpShape(ffn=(72, 64, 56, 48)))
    with pytest.raises(UnsupportedError, match=r"\(model\.mlp\.ffn\); add --homogenise, or write a megatron checkpoint"):
        family_of_shape(shape)
    for kind in (None, "llama"):
        with pytest.raises(
            UnsupportedError, match=r"ffn\); extract it again from its family with --homogenise, or write a megatron checkpoint"
        ):
            family_of_shape(shape, kind, holds_family=False)


def test_no_family_says_why_of_each() -> None:
    with pytest.raises(UnsupportedError, match="this model has no Hugging Face family; write a megatron checkpoint:") as caught:
        family_of_shape(tiny_moe())
    assert [line.split(" ")[0] for line in caught.value.problems] == [family.model_type for family in FAMILIES]
    with pytest.raises(UnsupportedError, match="family 'gemma' is not supported; choose one of llama, mistral"):
        family_of_shape(PLAIN, "gemma")
