"""Proves that the hybrid model computes what transformers' NemotronH computes, that packed documents do not see each other,
and that every parallel layout holds the same full model and gives the same logits as one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from megatron_elastic.errors import CheckpointError, ConfigError, UnsupportedError
from megatron_elastic.models.hybrid import build_hybrid, transformer_config
from megatron_elastic.models.weights import gather_tensors, scatter_tensors
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import Generation, megatron_generation, packed_documents
from megatron_elastic.shape import AttentionShape, ModelShape
from megatron_elastic.testing.tiny import randomize_, tiny_shape

LENGTH = 22


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 131, (batch, length), generator=torch.Generator().manual_seed(5))


def tiny_model(parallel: ParallelContext, shape: ModelShape | None = None) -> Any:
    model = build_hybrid(shape or tiny_shape(), parallel)
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


@pytest.mark.smoke
def test_training_step_gives_every_parameter_a_gradient(parallel: ParallelContext) -> None:
    model = build_hybrid(tiny_shape(), parallel).train()
    losses = model(tokens(), None, None, labels=tokens().roll(-1, 1))
    assert losses.shape == (2, LENGTH)
    assert abs(float(losses.detach().mean()) - torch.log(torch.tensor(136.0))) < 0.3
    losses.mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_weights_come_from_the_seed_alone(parallel: ParallelContext) -> None:
    first = gather_tensors(build_hybrid(tiny_shape(), parallel, seed=7))
    torch.randn(10)
    again, other = (gather_tensors(build_hybrid(tiny_shape(), parallel, seed=seed)) for seed in (7, 8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["output_layer.weight"], other["output_layer.weight"])
    std = float(first["decoder.layers.0.mixer.in_proj.weight"].std())
    assert abs(std / tiny_shape().init_std - 1) < 0.1
    out = float(first["decoder.layers.0.mixer.out_proj.weight"].std())
    assert abs(out * 6**0.5 / tiny_shape().init_std - 1) < 0.1


def test_scatter_is_the_inverse_of_gather_and_refuses_what_does_not_fit(parallel: ParallelContext) -> None:
    full = gather_tensors(tiny_model(parallel))
    fresh = build_hybrid(tiny_shape(), parallel)
    scatter_tensors(fresh, full)
    assert all(torch.equal(full[name], t) for name, t in gather_tensors(fresh).items())
    wrong = {**full, "decoder.final_norm.weight": torch.ones(3)}
    del wrong["output_layer.weight"]
    with pytest.raises(
        CheckpointError, match=r"(?s)output_layer.weight is missing.*final_norm.weight has shape \[3\], the model needs \[40\]"
    ):
        scatter_tensors(fresh, wrong)


def forward_on_layout(
    rank: int, world: int, layout: dict[str, int], tied: bool
) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
    """A rank's full logits (None before the last stage), the full weights, and the full fresh weights."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    parallel = ParallelContext.initialize(**layout)
    shape = tiny_shape(tied_embeddings=tied)
    model = build_hybrid(shape, parallel).eval()
    fresh = gather_tensors(model)
    randomize_(model, 3)
    ids = tokens()
    with torch.no_grad():
        if parallel.pipeline == 1:
            out = gather_from_tensor_model_parallel_region(model(ids, None, None), group=parallel.tp)
        else:
            out = _through_stages(model, ids, parallel, shape)
    weights = gather_tensors(model)
    parallel.destroy()
    return out, weights, fresh


def _through_stages(model: Any, ids: Tensor, parallel: ParallelContext, shape: ModelShape) -> Tensor | None:
    """Two stages by hand: the first sends its hidden states to the second."""
    peer = 1 - parallel.rank
    if parallel.is_first_stage:
        torch.distributed.send(model(ids, None, None).contiguous(), peer)
        return None
    hidden = torch.empty(ids.shape[1], ids.shape[0], shape.hidden_size)
    torch.distributed.recv(hidden, peer)
    model.set_input_tensor(hidden)
    return model(ids, None, None)


@pytest.mark.dist
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "expert": 2}, {"expert": 2}, {"pipeline": 2}], ids=str)
def test_layouts_equal_one_process(parallel: ParallelContext, ranks: Any, layout: dict[str, int], tied: bool) -> None:
    fresh = build_hybrid(tiny_shape(tied_embeddings=tied), parallel)
    model = tiny_model(parallel, tiny_shape(tied_embeddings=tied))
    with torch.no_grad():
        expected = model(tokens(), None, None)
    weights, started = gather_tensors(model), gather_tensors(fresh)
    results = ranks(forward_on_layout, 2, layout, tied)
    for out, theirs, theirs_started in results:
        assert theirs.keys() == weights.keys()
        assert all(torch.equal(theirs[name], t) for name, t in weights.items())
        assert all(torch.equal(theirs_started[name], t) for name, t in started.items())
        if out is not None:
            assert relative(out, expected) < 1e-5
    assert any(out is not None for out, _, _ in results)


def test_layouts_that_do_not_fit_are_listed_at_once(parallel: ParallelContext) -> None:
    layout = dataclasses.replace(parallel, tensor=5, pipeline=4, expert=3, expert_tensor=3)
    with pytest.raises(ConfigError) as caught:
        transformer_config(tiny_shape(), layout)
    for line in (
        "parallel.tensor 5 does not divide model.padded_vocab_size (or vocab_size) 136",
        "parallel.tensor 5 does not divide model.attention.heads 12",
        "parallel.tensor 5 and model.attention.kv_groups 2: one must divide the other",
        "parallel.tensor 5 does not divide model.mlp.ffn 72",
        "parallel.tensor 5 does not divide model.mamba.groups 4",
        "parallel.tensor 5 does not divide model.moe.shared_ffn 48",
        "parallel.expert 3 does not divide model.moe.experts 8",
        "parallel.expert_tensor 3 does not divide model.moe.ffn 56",
        "parallel.pipeline 4 does not divide the 6 layers of model.layer_pattern",
    ):
        assert line in str(caught.value)


@pytest.mark.skipif(megatron_generation() is not Generation.V0_16, reason="0.19 sums these gradients")
def test_experts_that_would_never_be_summed_are_refused(parallel: ParallelContext) -> None:
    with pytest.raises(UnsupportedError, match="set expert_tensor to 2 or raise parallel.expert"):
        transformer_config(tiny_shape(), dataclasses.replace(parallel, tensor=2, expert_tensor=1))
