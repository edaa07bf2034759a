"""Activation recompute: what a layer saved in its forward is thrown away and computed again when the backward needs it.

"selective" is megatron-core's own recompute of core attention, which reads everything it needs from its inputs. "full" is ours, one way for
every stack and release (the hybrid stack of 0.16.1 has none): a layer's forward runs under torch's non-reentrant checkpoint. That
runs the same forward a second time, in the middle of the backward and after forwards of other microbatches, so what the forward read besides its
inputs must be what it was, and what it counts must not count twice: a layer says in `replays` what to put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint


class Recompute(StrEnum):
    """What is computed again in the backward rather than kept."""

    NONE = "none"
    """Nothing."""
    SELECTIVE = "selective"
    """Core attention."""
    FULL = "full"
    """Every layer; only its input is kept."""


Replay = Callable[[], AbstractContextManager[None]]
"""Opens a context, as often as it is asked to, in which some state is what it was when the forward began."""


class RecomputableLayer(torch.nn.Module):
    """Comes before one of megatron's layer classes. recompute: whether its activations are computed again in the backward."""

    recompute: bool = False

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer."""
        forward = super().forward
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return forward(hidden_states, *args, **kwargs)
        # No state of a random generator is kept: there is no dropout, and decisions are drawn outside.
        return checkpoint(forward, hidden_states, *args, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts, **kwargs)

    def replays(self) -> Sequence[Replay]:
        """What a second run of the forward that now begins has to find as it is now."""
        routers = [child.router for child in self.children() if isinstance(child, MoELayer)]
        return [partial(_router_state, router, _counters(router)) for router in routers]

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Replayed(self.replays())


class RecomputableMambaLayer(RecomputableLayer, MambaLayer):
    """megatron's Mamba layer."""


class RecomputableTransformerLayer(RecomputableLayer, TransformerLayer):
    """megatron's transformer layer."""


class RecomputableMLPLayer(RecomputableTransformerLayer, MLPLayer):
    """megatron's layer of an MLP alone."""


class _Replayed(AbstractContextManager[None]):
    """All of `replays`, opened anew every time: a graph that is kept can be run backward more than once."""

    def __init__(self, replays: Sequence[Replay]) -> None:
        self._replays, self._stack = replays, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as opened:
            for replay in self._replays:
                opened.enter_context(replay())
            self._stack = opened.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _counters(router: TopKRouter) -> dict[str, torch.Tensor]:
    """A copy of what a router keeps from one microbatch to the next: its bias and its counts of tokens."""
    return {name: value.clone() for name, value in router.named_buffers(recurse=False)}


@contextmanager
def _router_state(router: TopKRouter, counters: dict[str, torch.Tensor]) -> Iterator[None]:
    """The router counts in copies of `counters` and records no auxiliary loss; attached losses stay, the graph needs them."""
    buffers, number = dict(router.named_buffers(recurse=False)), router.layer_number
    for name, value in counters.items():
        setattr(router, name, value.clone())
    router.layer_number = None  # megatron records a layer's auxiliary losses by its number, and none without one
    try:
        yield
    finally:
        router.layer_number = number
        for name, value in buffers.items():
            setattr(router, name, value)
