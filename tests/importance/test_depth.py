"""The drop order of layers is that of a naive greedy removal by the divergence of whole predictions, on every layout; block influence only says where to begin.

Run: pytest tests/importance/test_depth.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron_elastic.errors import DataError
from megatron_elastic.importance.depth import DepthOrder, _greedy, depth_order
from megatron_elastic.parallel import ParallelContext
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import tiny_dense, tiny_shape
from megatron_elastic.train.forward import hidden_states, output_weight
from tests.importance.calibration import random_parts
from tests.importance.rows import rows

HYBRID, DENSE = tiny_shape(layer_pattern="ME*-"), tiny_dense(gated=False, tied_embeddings=True)
ROWS = 2
LAYOUTS: Mapping[str, tuple[ModelShape, Mapping[str, Any]]] = {
    "DP2": (HYBRID, {}),
    "TP2+SP": (HYBRID, {"tensor": 2}),
    "PP2": (HYBRID, {"pipeline": 2}),
    "CP2": (HYBRID, {"context": 2}),
    "dense, TP2": (DENSE, {"tensor": 2, "sequence_parallel": False}),
    "dense, VPP2": (DENSE, {"pipeline": 2, "virtual_pipeline": 2}),
}


def ordered(rank: int, world: int, shape: ModelShape, layout: Mapping[str, Any]) -> DepthOrder:
    """The drop order of the random model of `shape` on a layout."""
    parallel = ParallelContext.initialize(**layout)
    try:
        return depth_order(random_parts(shape, parallel), shape, parallel, rows(shape.vocab_size, ROWS, parallel))
    finally:
        parallel.destroy()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_drops_in_the_same_order(name: str, parallel: Any, ranks: Any) -> None:
    shape, layout = LAYOUTS[name]
    expected = depth_order(random_parts(shape, parallel), shape, parallel, rows(shape.vocab_size, ROWS, parallel))
    for found in ranks(ordered, 2, shape, layout):
        assert found.drop_order == expected.drop_order
        assert found.errors == pytest.approx(expected.errors, rel=1e-4)
        assert found.influence == pytest.approx(expected.influence, rel=1e-4)


def _log_probabilities(model: Any, data: list[Any], dropped: set[int], shape: ModelShape) -> torch.Tensor:
    """[tokens that count, words] in fp64 without some layers, whose outputs are replaced by their inputs."""

    def identity(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return (states, *output[1:]) if isinstance(output, tuple) else states

    hooks = [layer.register_forward_hook(identity, with_kwargs=True) for n, layer in enumerate(model.decoder.layers) if n in dropped]
    with torch.no_grad():
        found = [
            (hidden_states(model.eval(), batch)[:, 0].double() @ output_weight(model).double().T)[batch.loss_mask[0] > 0] for batch in data
        ]
    for hook in hooks:
        hook.remove()
    return torch.cat(found)[:, : shape.vocab_size].log_softmax(-1)


@pytest.mark.parametrize("shape", [HYBRID, DENSE], ids=["hybrid", "dense"])
def test_the_order_is_that_of_a_naive_greedy_removal(shape: ModelShape, parallel: Any) -> None:
    (model,) = random_parts(shape, parallel)
    data = rows(shape.vocab_size, ROWS, parallel)
    whole, dropped, errors = _log_probabilities(model, data, set(), shape), [], []
    while len(dropped) < shape.num_layers - 1:
        tried = {
            layer: float((whole.exp() * (whole - _log_probabilities(model, data, {*dropped, layer}, shape))).sum(-1).mean())
            for layer in range(shape.num_layers)
            if layer not in dropped
        }
        dropped.append(min(tried, key=lambda layer: tried[layer]))
        errors.append(tried[dropped[-1]])
    found = depth_order([model], shape, parallel, data)
    assert list(found.drop_order[:-1]) == dropped
    assert found.errors == pytest.approx(errors, rel=1e-4)
    assert found.scores().argsort().tolist() == list(found.drop_order)
    assert sorted(found.drop_order) == list(range(shape.num_layers))
    assert type(model.decoder.layers[0]).__name__.startswith("Recomputable")  # elasticity is gone again


def test_a_layer_that_does_nothing_goes_first(parallel: Any) -> None:
    (model,) = random_parts(DENSE, parallel)
    with torch.no_grad():
        for name, parameter in model.decoder.layers[2].named_parameters():
            if "linear_proj" in name or "linear_fc2" in name:
                parameter.zero_()
    found = depth_order([model], DENSE, parallel, rows(DENSE.vocab_size, ROWS, parallel))
    assert found.drop_order[0] == 2 and found.errors[0] == pytest.approx(0, abs=1e-12)
    assert min(found.influence) == found.influence[2] == pytest.approx(0, abs=1e-6)


def test_candidates_are_tried_again_after_each_removal_and_given_up_early() -> None:
    """Layers 0 and 1 stand in for each other: either can go, not both. The start order changes what is computed, not what is found."""
    alone = {0: 0.1, 1: 0.15, 2: 0.3, 3: 0.5}
    limits: list[float] = []

    def error(dropped: frozenset[int], limit: float) -> float:
        limits.append(limit)
        return sum(alone[layer] for layer in dropped) + (1.0 if dropped >= {0, 1} else 0.0)

    for influence in ([0.0, 0.1, 0.2, 0.3], [0.3, 0.2, 0.1, 0.0]):
        assert _greedy(error, influence, None)[0] == (0, 2, 3, 1)
    assert limits[0] == float("inf") and limits[1] == 0.1


def test_predictions_that_are_no_numbers_are_refused(parallel: Any) -> None:
    parts, data = random_parts(DENSE, parallel), rows(DENSE.vocab_size, ROWS, parallel)
    with torch.no_grad():
        parts[0].decoder.layers[1].mlp.linear_fc2.weight[3] = torch.nan
    with pytest.raises(DataError, match="the predictions of the whole model diverge from themselves by nan"):
        depth_order(parts, DENSE, parallel, data)
    with pytest.raises(DataError, match=r"without layers \[\] and any other the predictions are no numbers"):
        _greedy(lambda dropped, limit: float("nan"), [0.1, 0.2, 0.3], None)


def test_text_without_tokens_is_refused(parallel: Any) -> None:
    data = rows(DENSE.vocab_size, ROWS, parallel)
    for batch in data:
        batch.loss_mask.zero_()
    with pytest.raises(DataError, match="no tokens to order layers on"):
        depth_order(random_parts(DENSE, parallel), DENSE, parallel, data)
