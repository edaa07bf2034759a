"""Proves that the hybrid model computes what transformers' NemotronH computes and that packed documents do not see each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import packed_documents
from megatron_elastic.shape import AttentionShape, ModelShape
from megatron_elastic.testing.tiny import randomize_, tiny_shape

LENGTH = 22


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 131, (batch, length), generator=torch.Generator().manual_seed(5))


def tiny_model(parallel: ParallelContext, shape: ModelShape | None = None) -> Any:
    model = build_model(shape or tiny_shape(), parallel)
    randomize_(model, 3)
    return model.eval()


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def nemotron_weights(full: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """The model's full tensors under transformers' names."""
    assert shape.attention is not None and shape.moe is not None
    heads, groups, width = shape.attention.heads, shape.attention.kv_groups, shape.attention.head_dim
    out = {
        "model.embeddings.weight": full["embedding.word_embeddings.weight"],
        "model.norm_f.weight": full["decoder.final_norm.weight"],
        "lm_head.weight": full["output_layer.weight"],
    }
    for n, letter in enumerate(shape.layer_pattern):
        mine, theirs = f"decoder.layers.{n}.", f"model.layers.{n}."
        layer = {name.removeprefix(mine): t for name, t in full.items() if name.startswith(mine)}
        mixer = f"{theirs}mixer."
        if letter == "M":
            out[f"{theirs}norm.weight"] = layer.pop("mixer.in_proj.layer_norm_weight")
            out |= {theirs + name: t for name, t in layer.items()}
        elif letter == "*":
            out[f"{theirs}norm.weight"] = layer["self_attention.linear_qkv.layer_norm_weight"]
            # Each group holds its query heads, then its key head, then its value head.
            fused = layer["self_attention.linear_qkv.weight"].unflatten(0, (groups, heads // groups + 2, width))
            out[f"{mixer}q_proj.weight"] = fused[:, :-2].flatten(0, 2)
            out[f"{mixer}k_proj.weight"] = fused[:, -2].flatten(0, 1)
            out[f"{mixer}v_proj.weight"] = fused[:, -1].flatten(0, 1)
            out[f"{mixer}o_proj.weight"] = layer["self_attention.linear_proj.weight"]
        elif letter == "-":
            out[f"{theirs}norm.weight"] = layer["mlp.linear_fc1.layer_norm_weight"]
            out[f"{mixer}up_proj.weight"] = layer["mlp.linear_fc1.weight"]
            out[f"{mixer}down_proj.weight"] = layer["mlp.linear_fc2.weight"]
        else:
            out[f"{theirs}norm.weight"] = layer["pre_mlp_layernorm.weight"]
            out[f"{mixer}gate.weight"] = layer["mlp.router.weight"]
            out[f"{mixer}gate.e_score_correction_bias"] = layer["mlp.router.expert_bias"]
            for mine_fc, their_fc in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj")):
                experts = [layer[f"mlp.experts.local_experts.{k}.{mine_fc}.weight"] for k in range(shape.moe.experts)]
                out[f"{mixer}experts.{their_fc}"] = torch.stack(experts)
                out[f"{mixer}shared_experts.{their_fc}.weight"] = layer[f"mlp.shared_experts.{mine_fc}.weight"]
    return out


def nemotron(shape: ModelShape) -> Any:
    transformers = pytest.importorskip("transformers")
    assert shape.attention and shape.mlp and shape.moe and shape.mamba
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    config = transformers.NemotronHConfig(
        vocab_size=shape.vocab_rows,
        layers_block_type=[kinds[letter] for letter in shape.layer_pattern],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp.ffn,
        num_attention_heads=shape.attention.heads,
        num_key_value_heads=shape.attention.kv_groups,
        head_dim=shape.attention.head_dim,
        mamba_num_heads=shape.mamba.heads,
        mamba_head_dim=shape.mamba.head_dim,
        n_groups=shape.mamba.groups,
        ssm_state_size=shape.mamba.state,
        conv_kernel=shape.mamba.conv,
        # One chunk: its plain-PyTorch scan sums over the wrong chunk axis when it carries the state between several.
        chunk_size=LENGTH,
        n_routed_experts=shape.moe.experts,
        num_experts_per_tok=shape.moe.topk,
        moe_intermediate_size=shape.moe.ffn,
        moe_shared_expert_intermediate_size=shape.moe.shared_ffn,
        routed_scaling_factor=shape.moe.scaling_factor,
        layer_norm_epsilon=shape.norm_epsilon,
        use_mamba_kernels=False,
        num_nextn_predict_layers=0,
    )
    return transformers.NemotronHForCausalLM(config).float().eval()


def test_logits_equal_nemotron_h(parallel: ParallelContext) -> None:
    attention = dataclasses.replace(tiny_shape().attention or AttentionShape(heads=1, kv_groups=1, head_dim=1), qkv_bias=False)
    shape = tiny_shape(attention=attention, norm_epsilon=3e-3)  # transformers has no biases; a norm with another epsilon would show
    model = tiny_model(parallel, shape)
    reference = nemotron(shape)
    reference.load_state_dict(nemotron_weights(gather_tensors(model), shape))
    with torch.no_grad():
        mine, theirs = model(tokens(), None, None), reference(tokens(), use_cache=False).logits
    assert theirs.std() > 0.3
    assert relative(mine, theirs) < 1e-4
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_packed_documents_equal_documents_alone(parallel: ParallelContext) -> None:
    """Forward and backward; the last document is the rest after the last boundary."""
    model = tiny_model(parallel)
    packed = packed_documents(torch.tensor([0, 1, 10, 17], dtype=torch.int32), 9, LENGTH)
    whole = model(tokens(1), None, None, packed_seq_params=packed)
    alone = torch.cat([model(tokens(1)[:, a:b], None, None) for a, b in ((0, 1), (1, 10), (10, 17), (17, LENGTH))], 1)
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-5)
    assert relative(model(tokens(1), None, None), alone) > 0.1  # unpacked they do see each other
    weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad((whole * weight).sum(), parameters), torch.autograd.grad((alone * weight).sum(), parameters), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_unfused_mixer_equals_the_fused_one(parallel: ParallelContext) -> None:
    """The path without megatron-core's single call: convolution, scan and gated norm one by one."""
    model = tiny_model(parallel)
    with torch.no_grad():
        fused = model(tokens(), None, None)
        for module in model.modules():
            if isinstance(module, MambaMixer):
                module.use_mem_eff_path = False
        torch.testing.assert_close(model(tokens(), None, None), fused)


def test_no_token_sees_a_later_one(parallel: ParallelContext) -> None:
    model = tiny_model(parallel)
    changed = tokens()
    changed[:, 12:] = (changed[:, 12:] + 1) % 131
    with torch.no_grad():
        before, after = model(tokens(), None, None), model(changed, None, None)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert relative(before[:, 12:], after[:, 12:]) > 0.1


def test_training_step_gives_every_parameter_a_gradient(parallel: ParallelContext) -> None:
    model = build_model(tiny_shape(), parallel).train()
    losses = model(tokens(), None, None, labels=tokens().roll(-1, 1))
    assert losses.shape == (2, LENGTH)
    assert abs(float(losses.detach().mean()) - torch.log(torch.tensor(136.0))) < 0.3
    losses.mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
