"""Proves that dense and mixture-of-experts GPT models compute what transformers' models compute, that packed documents do not see each
other, and that training reaches every parameter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_elastic.models.build import build_model
from megatron_elastic.models.weights import gather_tensors
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import packed_documents
from megatron_elastic.shape import AttentionShape, MlpShape, ModelShape, MoeShape
from megatron_elastic.testing.tiny import randomize_, tiny_dense, tiny_moe
from tests.models.gpt_references import reference_model, reference_weights

LENGTH = 22
PARENTS = {
    "dense gated": tiny_dense(),
    "dense plain": tiny_dense(gated=False),
    "sigmoid experts": tiny_moe(),
    "softmax experts": tiny_moe(score="softmax"),
}


@dataclass(frozen=True)
class Reference:
    """A transformers model: its name, the shape that is the same model, config fields of its own, its names for the dense MLP."""

    kind: str
    shape: ModelShape
    special: dict[str, Any] = field(default_factory=dict)
    mlp_names: dict[str, str] = field(default_factory=dict)


def attention(shape: ModelShape, **changes: Any) -> AttentionShape:
    assert shape.attention is not None
    return replace(shape.attention, **changes)


def moe(shape: ModelShape, **changes: Any) -> MoeShape:
    assert shape.moe is not None
    return replace(shape.moe, **changes)


def _references() -> dict[str, Reference]:
    # An epsilon no default has: a norm with another one would show.
    gated, plain = tiny_dense(norm_epsilon=3e-3), tiny_dense(gated=False, norm_epsilon=3e-3)
    llama = replace(gated, hidden_size=48)  # it wants a multiple of the heads, though its heads have a width of their own
    whole, bare = {"qk_norm": False, "rope_fraction": 1.0}, {"qk_norm": False, "qkv_bias": False}
    softmax = tiny_moe(score="softmax", normalization="RMSNorm", activation="silu", gated=True, norm_epsilon=3e-3)
    softmax = replace(softmax, attention=attention(softmax, qkv_bias=False))
    sigmoid = tiny_moe(norm_epsilon=3e-3, mlp=MlpShape(ffn=72), moe=moe(tiny_moe(), shared_ffn=112, groups_per_token=3))
    sigmoid = replace(sigmoid, attention=attention(sigmoid, rope_fraction=0.6))
    # Its heads are hidden_size / heads wide.
    stable = replace(plain, activation="silu", gated=True, linear_bias=False, tied_embeddings=True)
    stable = replace(stable, attention=attention(stable, heads=4, rope_fraction=0.6))
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 56, "mlp_only_layers": [0]}
    grouped = {"n_routed_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 56, "n_shared_experts": 2, "n_group": 4}
    grouped |= {"topk_group": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 1}
    return {
        "Llama": Reference("Llama", replace(llama, attention=attention(gated, **bare | whole))),
        "Llama, biases, tied": Reference(
            "Llama",
            replace(llama, attention=attention(gated, **whole), linear_bias=True, tied_embeddings=True),
            {"attention_bias": True, "mlp_bias": True},
        ),
        "Qwen2": Reference("Qwen2", replace(gated, attention=attention(gated, **whole))),
        "Qwen3": Reference("Qwen3", replace(gated, attention=attention(gated, qkv_bias=False, rope_fraction=1.0))),
        "Starcoder2": Reference(
            "Starcoder2",
            replace(plain, attention=attention(plain, rope_fraction=1.0)),
            mlp_names={
                f"mlp.{a}_proj.{kind}": f"mlp.{b}.{kind}" for a, b in (("up", "c_fc"), ("down", "c_proj")) for kind in ("weight", "bias")
            },
        ),
        "StableLm": Reference("StableLm", stable, {"use_qkv_bias": True}),
        "Qwen3Moe": Reference("Qwen3Moe", softmax, experts | {"norm_topk_prob": True}),
        "Qwen3Moe, gates not renormalised": Reference(
            "Qwen3Moe", replace(softmax, moe=moe(softmax, pre_softmax=True)), experts | {"norm_topk_prob": False}
        ),
        "Glm4Moe": Reference("Glm4Moe", sigmoid, grouped),
    }


REFERENCES = _references()


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, 131, (batch, length), generator=torch.Generator().manual_seed(5))


def moved_model(shape: ModelShape, parallel: ParallelContext) -> Any:
    model = build_model(shape, parallel)
    randomize_(model, 3)
    return model.eval()


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_equal_transformers(parallel: ParallelContext, name: str) -> None:
    case = REFERENCES[name]
    model, theirs = moved_model(case.shape, parallel), reference_model(case.kind, case.shape, **case.special)
    theirs.load_state_dict(reference_weights(gather_tensors(model), case.shape, case.mlp_names))
    with torch.no_grad():
        mine, expected = model(tokens(), None, None), theirs(tokens(), use_cache=False).logits
    assert expected.std() > 0.3
    assert relative(mine, expected) < 1e-5
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parent", PARENTS)
def test_packed_documents_equal_documents_alone(parallel: ParallelContext, parent: str) -> None:
    """Forward and backward: positions restart, and attention ends, at each boundary."""
    model = moved_model(PARENTS[parent], parallel)
    packed = packed_documents(torch.tensor([0, 1, 10, 17, LENGTH], dtype=torch.int32), 9, LENGTH)
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


def test_without_rotary_embeddings_only_the_mask_orders_tokens(parallel: ParallelContext) -> None:
    """With them, the last token's logits depend on the order of those before it; without, in one layer, they do not."""
    swapped = tokens()
    swapped[:, [2, 7]] = swapped[:, [7, 2]]
    found = {}
    for base in (None, 500.0):
        shape = tiny_dense(layer_pattern="T")
        model = moved_model(replace(shape, attention=attention(shape, rope_base=base)), parallel)
        with torch.no_grad():
            found[base] = relative(model(swapped, None, None)[:, -1], model(tokens(), None, None)[:, -1])
    assert found[None] < 1e-5 and found[500.0] > 1e-3


@pytest.mark.parametrize("parent", PARENTS)
def test_training_step_gives_every_parameter_a_gradient(parallel: ParallelContext, parent: str) -> None:
    model = build_model(PARENTS[parent], parallel).train()
    model(tokens(), None, None, labels=tokens().roll(-1, 1)).mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize("term", ["aux_loss", "z_loss"])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_router_losses_reach_the_router(parallel: ParallelContext, score: Any, term: str) -> None:
    grads = []
    for weight in (None, 0.5):
        shape = tiny_moe(score=score)
        model = moved_model(replace(shape, moe=moe(shape, **{term: weight})), parallel).train()
        model(tokens(), None, None, labels=tokens().roll(-1, 1)).mean().backward()
        grads.append(model.decoder.layers[2].mlp.router.weight.grad)
    assert relative(grads[1], grads[0]) > 0.01
