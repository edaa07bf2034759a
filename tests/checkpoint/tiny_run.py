"""A tiny training run on megatron-core's schedule, DDP and distributed optimizer, for the tests beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_elastic.parallel import ParallelContext
from megatron_elastic.platform.versions import packed_documents
from megatron_elastic.shape import ModelShape
from megatron_elastic.testing.tiny import tiny_shape

SHAPE: ModelShape = tiny_shape()
TOKENS = 24


@dataclass
class Run:
    """A model with its optimizer and the losses it has seen (on the last pipeline stage).

    chunks: this rank's parts of the model in DDP; one, unless the pipeline is interleaved.
    """

    parallel: ParallelContext
    chunks: list[Any]
    optimizer: Any
    losses: list[float]

    @property
    def model(self) -> Any:
        """The only chunk."""
        (chunk,) = self.chunks
        return chunk

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, moments and step numbers of this rank."""
        from megatron_elastic.checkpoint.sharded.optimizer import inner_optimizers

        found = {f"model.{name}": parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        found |= {f"model.{name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        for number, inner in enumerate(inner_optimizers(self.optimizer)):
            parameters = [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]
            for place, parameter in enumerate(parameters):
                for key, value in inner.optimizer.state[parameter].items():
                    found[f"optimizer{number}.{place}.{key}"] = value.clone()
        return found


def start(parallel: ParallelContext, *, shape: ModelShape = SHAPE, seed: int = 7) -> Run:
    """Fresh objects; another seed gives other weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_elastic.models.build import build_model
    from megatron_elastic.testing.tiny import randomize_

    chunks = []
    for part in range(parallel.virtual_pipeline):
        bare = build_model(shape, parallel, part=part)
        randomize_(bare, seed)
        bare.config.finalize_model_grads_func = finalize_model_grads
        chunks.append(DistributedDataParallel(bare.config, DistributedDataParallelConfig(use_distributed_optimizer=True), bare))
    config = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=True, params_dtype=torch.float32
    )
    return Run(parallel, chunks, get_megatron_optimizer(config, chunks, use_gloo_process_groups=False), [])


def train(run: Run, first: int, steps: int, texts: int = 2) -> None:
    """Take optimizer steps `first` to `first + steps - 1`, each on `texts` texts that depend on the step's number alone."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for step in range(first, first + steps):
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        data = [_text(run.parallel, step, texts) for _ in run.chunks]
        losses = get_forward_backward_func(run.parallel.pipeline, len(data) if len(data) > 1 else None)(
            forward_step_func=_forward,
            data_iterator=data if len(data) > 1 else data[0],
            model=run.chunks,
            num_microbatches=texts // run.parallel.data,
            seq_length=TOKENS,
            micro_batch_size=1,
            forward_only=False,
        )
        run.optimizer.step()
        run.losses += [float(loss["loss"]) for loss in losses]


def _text(parallel: ParallelContext, step: int, texts: int) -> Iterator[torch.Tensor]:
    for number in range(parallel.data_rank, texts, parallel.data):
        generator = torch.Generator().manual_seed(1000 * step + number)
        yield torch.randint(SHAPE.vocab_size, (1, TOKENS + 1), generator=generator)


def _forward(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    text = next(data)
    bounds = torch.tensor([0, 10, TOKENS], dtype=torch.int32)
    losses = model(
        text[:, :-1], torch.arange(TOKENS)[None], None, labels=text[:, 1:], packed_seq_params=packed_documents(bounds, 14, TOKENS)
    )
    return losses, partial(_loss)


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = losses.float().sum()
    return total, torch.tensor(losses.numel(), dtype=torch.int), {"loss": total.detach() / losses.numel()}
