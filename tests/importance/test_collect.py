"""Calibration sees what a naive script sees, and the same on every layout: data, tensor, sequence, pipeline, expert and context parallelism.

Also: what does not count (padding) has no say, what is NaN is refused by its layer, what is not observed fails by name, models and their
modes are left as they were, and components that matter come first under every criterion.

Run: pytest tests/importance/test_collect.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_elastic.axes import ElasticAxis
from megatron_elastic.errors import DataError, UnsupportedError
from megatron_elastic.importance.collect import Collected, collect
from megatron_elastic.importance.ranking import score_shapes
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import tiny_dense, tiny_moe, tiny_shape
from tests.importance.calibration import ROWS, calibrated, plain, random_parts
from tests.importance.rows import row, rows

NAMES = ("energy", "activation", "minitron", "taylor", "magnitude")
HYBRID, DENSE = tiny_shape(), tiny_dense(gated=False, tied_embeddings=True)
GROUPED = tiny_moe(layer_pattern="TX")
LAYOUTS: Mapping[str, tuple[ModelShape, Mapping[str, Any]]] = {
    "hybrid, DP2": (HYBRID, {}),
    "hybrid, TP2+SP": (HYBRID, {"tensor": 2}),
    "hybrid, PP2": (HYBRID, {"pipeline": 2}),
    "hybrid, EP2": (HYBRID, {"expert": 2}),
    "hybrid, CP2": (HYBRID, {"context": 2}),
    "grouped experts, EP2 gathering": (GROUPED, {"expert": 2, "dispatcher": "allgather"}),
    "dense, TP2": (DENSE, {"tensor": 2, "sequence_parallel": False}),
    "dense, VPP2": (DENSE, {"pipeline": 2, "virtual_pipeline": 2}),
}


@pytest.fixture(scope="module")
def alone(parallel_of_module: ParallelContext) -> Callable[[ModelShape], dict[str, Collected]]:
    """Criterion -> what one process finds in the model of a shape."""
    known: dict[ModelShape, dict[str, Collected]] = {}

    def of(shape: ModelShape) -> dict[str, Collected]:
        if shape not in known:
            parts = random_parts(shape, parallel_of_module)
            data = rows(shape.vocab_size, ROWS, parallel_of_module)
            known[shape] = {name: collect(parts, shape, parallel_of_module, data, criterion=name) for name in NAMES}
        return known[shape]

    return of


@pytest.fixture(scope="module")
def parallel_of_module(_one_process: ParallelContext) -> ParallelContext:
    """The session's process, for fixtures of a module."""
    return _one_process


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_finds_the_same(name: str, alone: Any, ranks: Any) -> None:
    shape, layout = LAYOUTS[name]
    found, expected = ranks(calibrated, 2, shape, layout, NAMES)[0], alone(shape)
    for criterion in NAMES:
        ours, theirs = plain(found[criterion]), plain(expected[criterion])
        assert ours.keys() == theirs.keys()
        for key, values in theirs.items():
            torch.testing.assert_close(
                ours[key], values, rtol=3e-5, atol=1e-6 * float(values.max()), msg=lambda text, k=key, c=criterion: f"{c}, {k}: {text}"
            )
        assert found[criterion].tokens == expected[criterion].tokens


def _captured(model: Any, module: str, side: str, data: list[Any], shape: ModelShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Every row's activation [tokens, entries] at a module, and its gradient, as autograd keeps them."""
    from megatron_elastic.distill.losses import OutputLossTerms
    from megatron_elastic.train.forward import batch_loss, hidden_states

    kept: list[torch.Tensor] = []

    def keep(_: Any, args: Any, output: Any = None) -> None:
        value = args[0] if side == "input" else output[0] if isinstance(output, tuple) else output
        value.retain_grad()
        kept.append(value)

    target = model.get_submodule(module)
    handle = target.register_forward_pre_hook(keep) if side == "input" else target.register_forward_hook(keep)
    terms = OutputLossTerms(vocab_size=shape.vocab_size, kl_weight=0.0, ce_weight=1.0)
    for batch in data:
        batch_loss(model, hidden_states(model, batch), batch, terms, None, None, model_parallel(model)).total.backward()
    handle.remove()
    return [value.detach()[:, 0].double() for value in kept], [value.grad[:, 0].double() for value in kept if value.grad is not None]


def model_parallel(model: Any) -> Any:
    """What the loss reads of a layout, on one process."""
    return type("Layout", (), {"sequence_parallel": False, "tp": model.pg_collection.tp})()


@pytest.mark.parametrize(("module", "side", "axis", "layer"), [
    ("decoder.layers.3.mlp.linear_fc2", "input", ElasticAxis.FFN, 3),
    ("decoder.layers.1.mlp.shared_experts.linear_fc2", "input", ElasticAxis.SHARED_FFN, 1),
    ("decoder.layers.2.self_attention.linear_proj", "input", ElasticAxis.HEADS, 2),
    ("decoder.layers.0.mixer.in_proj", "output", ElasticAxis.MAMBA_HEAD_DIM, 0),
])  # fmt: skip
def test_scores_are_those_of_a_naive_loop(module: str, side: str, axis: ElasticAxis, layer: int, alone: Any, parallel: Any) -> None:
    (model,) = random_parts(HYBRID, parallel)
    data = rows(HYBRID.vocab_size, ROWS, parallel)
    values, gradients = _captured(model.eval(), module, side, data, HYBRID)
    entries = values[0].shape[1]
    sums = {name: torch.zeros(entries, dtype=torch.float64) for name in ("energy", "activation", "taylor", "minitron")}
    tokens = 0
    for batch, value, gradient in zip(data, values, gradients, strict=True):
        of_row, in_row = torch.zeros(entries, dtype=torch.float64), 0
        for token in range(len(value)):
            if batch.loss_mask[0, token] > 0:
                of_row += value[token].abs()
                sums["energy"] += value[token] ** 2
                sums["taylor"] += (value[token] * gradient[token]).abs()
                in_row += 1
        sums["activation"] += of_row
        sums["minitron"] += (of_row / in_row) ** 2
        tokens += in_row
    column = model.get_submodule(module).weight.detach().double().square().sum(0).sqrt() if side == "input" else 1.0
    expected = {
        "energy": (sums["energy"] / tokens).sqrt() * column,
        "activation": sums["activation"] / tokens,
        "taylor": sums["taylor"] / tokens,
        "minitron": sums["minitron"].sqrt(),
    }
    for name, flat in expected.items():
        torch.testing.assert_close(
            alone(HYBRID)[name].scores[axis][layer], _components(flat, axis), rtol=2e-5, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


def _components(flat: torch.Tensor, axis: ElasticAxis) -> torch.Tensor:
    assert HYBRID.attention is not None and HYBRID.mamba is not None
    if axis is ElasticAxis.HEADS:
        return torch.stack([part.square().sum().sqrt() for part in flat.split(HYBRID.attention.head_dim)])
    if axis is ElasticAxis.MAMBA_HEAD_DIM:
        heads, channels = HYBRID.mamba.heads, HYBRID.mamba.head_dim
        assert isinstance(heads, int) and isinstance(channels, int)
        x = flat[heads * channels : 2 * heads * channels]  # behind z
        return torch.stack([x[channel::channels].square().sum().sqrt() for channel in range(channels)])
    return flat


def test_hidden_is_the_sum_over_the_norms_before_all_sublayers(alone: Any, parallel: Any) -> None:
    (model,) = random_parts(HYBRID, parallel)
    absolute, squares = torch.zeros(2, HYBRID.num_layers, HYBRID.hidden_size, dtype=torch.float64)
    tokens = 0
    streams: list[torch.Tensor] = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: streams.append(kwargs.get("hidden_states", *args)), with_kwargs=True)
    weights = [_norm_weight(layer) for layer in model.decoder.layers]
    from megatron_elastic.train.forward import hidden_states

    with torch.no_grad():
        for batch in rows(HYBRID.vocab_size, ROWS, parallel):
            streams.clear()
            hidden_states(model.eval(), batch)
            counted = batch.loss_mask[0] > 0
            tokens += int(counted.sum())
            for layer, (stream, weight) in enumerate(zip(streams, weights, strict=True)):
                x = stream[:, 0].double()
                normed = x / (x.square().mean(-1, keepdim=True) + HYBRID.norm_epsilon).sqrt() * weight.double()
                absolute[layer] += normed[counted].abs().sum(0)
                squares[layer] += normed[counted].square().sum(0)
    for name, expected in {"activation": (absolute / tokens).sum(0), "energy": (squares / tokens).sqrt().sum(0)}.items():
        torch.testing.assert_close(alone(HYBRID)[name].scores[ElasticAxis.HIDDEN][None], expected, rtol=2e-5, atol=0)


def _norm_weight(layer: Any) -> torch.Tensor:
    names = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight",
             "mixer.in_proj.layer_norm_weight")  # fmt: skip
    found = dict(layer.named_parameters())
    return next(found[name] for name in names if name in found)


def test_every_axis_of_a_ranking_is_there(alone: Any) -> None:
    for shape in (HYBRID, DENSE, GROUPED):
        for found in alone(shape).values():
            for axis in ElasticAxis:
                wanted = {} if axis is ElasticAxis.LAYERS else score_shapes(shape, axis)
                assert {layer: tuple(values.shape) for layer, values in found.scores.get(axis, {}).items()} == wanted
            assert found.criteria.keys() == found.scores.keys()


assert HYBRID.attention is not None
PLANTED = tiny_shape(layer_pattern="ME*-", attention=replace(HYBRID.attention, kv_groups=12))
"""As many KV groups as heads, so that one head's values can be planted."""


def _plant(model: Any, axis: ElasticAxis, component: int) -> None:
    """Make one component matter more than all others of its axis, by all weights that write and read it."""
    mamba, attention = PLANTED.mamba, PLANTED.attention
    assert (
        mamba is not None
        and attention is not None
        and isinstance(mamba.heads, int)
        and isinstance(mamba.head_dim, int)
        and isinstance(mamba.state, int)
    )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        if axis is ElasticAxis.HIDDEN:
            for name, weight in parameters.items():
                if name.endswith(("layer_norm_weight", "layernorm.weight", "final_norm.weight")):
                    weight[component] *= 6
                if name.endswith(("linear_fc2.weight", "linear_proj.weight", "out_proj.weight")):
                    weight[component] *= 6
            parameters["embedding.word_embeddings.weight"][:, component] *= 6
            return
        if axis is ElasticAxis.HEADS:
            width = attention.head_dim
            parameters["decoder.layers.2.self_attention.linear_qkv.weight"].view(attention.heads, 3, width, -1)[component, 2] *= 6
            parameters["decoder.layers.2.self_attention.linear_proj.weight"][:, component * width : (component + 1) * width] *= 6
            return
        if axis in (ElasticAxis.FFN, ElasticAxis.SHARED_FFN, ElasticAxis.MOE_FFN):
            where = {
                ElasticAxis.FFN: "3.mlp",
                ElasticAxis.SHARED_FFN: "1.mlp.shared_experts",
                ElasticAxis.MOE_FFN: "1.mlp.experts.local_experts.3",
            }
            parameters[f"decoder.layers.{where[axis]}.linear_fc1.weight"][component] *= 6
            parameters[f"decoder.layers.{where[axis]}.linear_fc2.weight"][:, component] *= 6
            return
        inner, state = mamba.heads * mamba.head_dim, mamba.groups * mamba.state
        rows_in = parameters["decoder.layers.0.mixer.in_proj.weight"]
        x, out = rows_in[inner : 2 * inner], parameters["decoder.layers.0.mixer.out_proj.weight"]
        if axis is ElasticAxis.MAMBA_STATE:
            rows_in[2 * inner + component] *= 6
            rows_in[2 * inner + state + component] *= 6
            return
        step, width = mamba.head_dim, mamba.head_dim
        chosen = slice(component * width, (component + 1) * width) if axis is ElasticAxis.MAMBA_HEADS else slice(component, None, step)
        x[chosen] *= 6
        out[:, chosen] *= 6


@pytest.mark.parametrize("axis", [axis for axis in ElasticAxis if axis not in (ElasticAxis.EXPERTS, ElasticAxis.TOPK, ElasticAxis.LAYERS)])
def test_a_planted_component_comes_first_under_every_criterion(axis: ElasticAxis, parallel: Any) -> None:
    parts = random_parts(PLANTED, parallel)
    component = 5
    _plant(parts[0], axis, component)
    data = rows(PLANTED.vocab_size, ROWS, parallel)
    for name in NAMES:
        (values,) = collect(parts, PLANTED, parallel, data, criterion=name).scores[axis].values()
        values = values[3] if axis is ElasticAxis.MOE_FFN else values
        assert int(values.argmax()) == component, (name, values)
    first = collect(parts, PLANTED, parallel, data, criterion="random", seed=1).scores[axis]
    again = collect(parts, PLANTED, parallel, data, criterion="random", seed=1).scores[axis]
    other = collect(parts, PLANTED, parallel, data, criterion="random", seed=2).scores[axis]
    for layer, values in first.items():
        assert torch.equal(values, again[layer]) and not torch.equal(values, other[layer])


def test_padding_has_no_say(parallel: Any) -> None:
    parts = random_parts(PLANTED, parallel)
    data = [row(PLANTED.vocab_size, number) for number in range(3)]
    tail = 4  # of the last document, so that no token that counts comes after it
    for batch in data:
        batch.loss_mask[:, -tail:] = 0
    before = {name: plain(collect(parts, PLANTED, parallel, data, criterion=name)) for name in NAMES}
    for batch in data:
        batch.tokens[:, -tail:] = (batch.tokens[:, -tail:] + 7) % PLANTED.vocab_size
    for name, tensors in before.items():
        after = plain(collect(parts, PLANTED, parallel, data, criterion=name))
        for key, values in tensors.items():
            torch.testing.assert_close(after[key], values, rtol=1e-6, atol=1e-8, msg=lambda text, k=key, n=name: f"{n}, {k}: {text}")


def test_a_model_is_left_as_it_was_and_recompute_changes_nothing(alone: Any, parallel: Any) -> None:
    parts = random_parts(HYBRID, parallel)
    for module in parts[0].modules():
        if hasattr(module, "recompute"):
            module.recompute = True
    parts[0].train()
    parts[0].decoder.final_norm.weight.requires_grad_(requires_grad=False)
    found = collect(parts, HYBRID, parallel, rows(HYBRID.vocab_size, ROWS, parallel), criterion="taylor")
    for key, values in plain(alone(HYBRID)["taylor"]).items():
        torch.testing.assert_close(plain(found)[key], values, rtol=1e-6, atol=0)
    assert all(module.training for module in parts[0].modules())
    assert [name for name, p in parts[0].named_parameters() if not p.requires_grad] == ["decoder.final_norm.weight"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in parts[0].modules())
    assert all(p.grad is None for p in parts[0].parameters())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "magnitude"])
def test_memory_is_that_of_the_statistics_however_long_the_text(name: str, parallel: Any) -> None:
    parts, data = random_parts(HYBRID, parallel), rows(HYBRID.vocab_size, ROWS, parallel)
    held: list[int] = []
    collect(parts, HYBRID, parallel, data, criterion=name, progress=lambda done, total: held.append(tensor_bytes()))
    assert len(held) == ROWS and held[1:] == [held[1]] * (ROWS - 1), "tensors pile up from row to row"


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive, each storage once."""
    gc.collect()
    storages = [found.untyped_storage() for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_a_number_is_refused_by_its_layer(name: str, parallel: Any) -> None:
    parts = random_parts(HYBRID, parallel)
    with torch.no_grad():
        parts[0].decoder.layers[3].mlp.linear_fc2.weight[:, 7] = torch.nan
        parts[0].decoder.layers[3].mlp.linear_fc1.weight[7] = torch.nan
    where = {"taylor": "layer", "magnitude": "layer 3, hidden"}.get(name, "layer 3, ffn")
    with pytest.raises(DataError, match=f"{where}.*NaN or infinite"):
        collect(parts, HYBRID, parallel, rows(HYBRID.vocab_size, 2, parallel), criterion=name, experts="random")


def test_text_without_tokens_is_refused(parallel: Any) -> None:
    parts = random_parts(PLANTED, parallel)
    data = [row(PLANTED.vocab_size, number) for number in range(2)]
    for batch in data:
        batch.loss_mask.zero_()
    with pytest.raises(DataError, match="no tokens to rank on"):
        collect(parts, PLANTED, parallel, data)


def test_what_nothing_observes_fails_by_name(monkeypatch: Any, parallel: Any) -> None:
    from megatron_elastic.importance import observe

    monkeypatch.setattr(observe, "WIDTHS", tuple(site for site in observe.WIDTHS if site.axis is not ElasticAxis.FFN))
    monkeypatch.setattr(observe, "NORMS", observe.NORMS[:-1])
    with pytest.raises(UnsupportedError, match=r"nothing was observed at layer 0, hidden \(the norm before mamba\); layer 3, ffn: "):
        collect(random_parts(PLANTED, parallel), PLANTED, parallel, rows(PLANTED.vocab_size, 2, parallel))
