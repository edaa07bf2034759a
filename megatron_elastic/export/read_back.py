"""A written Hugging Face directory as transformers reads it: the ordinary model that its users will have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_elastic.errors import CheckpointError, UnsupportedError
from megatron_elastic.hf.bars import without_bars


class TransformersModel:
    """transformers' model of a directory, in fp32 and in evaluation mode, read without remote code and without the network.

    longest: tokens of the longest sequence it will see. Raises UnsupportedError without transformers, CheckpointError when it cannot read the
    directory or finds tensors missing or too many.
    """

    def __init__(self, directory: Path, longest: int) -> None:
        try:
            from huggingface_hub.errors import StrictDataclassError
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError:
            raise UnsupportedError("reading a Hugging Face directory back needs transformers; install megatron-elastic[hf]") from None
        where = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = AutoConfig.from_pretrained(directory, **where)
            if "chunk_size" in config.to_dict():
                # transformers 5.14 sums over the wrong axis when its plain-PyTorch scan of Mamba-2 has several chunks; one gives the same model.
                config.chunk_size = longest
                # It also raises time steps to the smallest of fresh weights, which neither its CUDA kernels nor megatron-core do. Above 0, as it
                # takes the logarithm.
                config.time_step_min = torch.finfo(torch.float32).tiny
            with without_bars():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    directory,
                    config=config,
                    dtype=torch.float32,
                    output_loading_info=True,
                    experts_implementation="eager",  # torch's grouped product refuses widths that are no multiple of 16 bytes
                    **where,
                )
        except (OSError, ValueError, RuntimeError, KeyError, StrictDataclassError, SafetensorError) as error:
            raise CheckpointError(f"transformers cannot read {str(directory)!r}: {' '.join(str(error).split())}") from None
        self._model, info = loaded
        wrong = [f"{kind.replace('_', ' ')}: {sorted(names)}" for kind, names in info.items() if names]
        if wrong:
            raise CheckpointError(f"transformers reads {str(directory)!r} incompletely: {'; '.join(wrong)}")
        self._model.eval()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length, vocabulary] in fp32, of ids [batch, length]."""
        output: Any = self._model(tokens, use_cache=False)
        return output.logits

    @torch.no_grad()
    def loss(self, documents: list[Tensor]) -> float:
        """Nats per token of windows [length + 1] of ids, of which the first has nothing before it."""
        total, scored = 0.0, 0
        for ids in documents:
            logits = self.logits(ids[None, :-1])[0]
            total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            scored += len(ids) - 1
        return total / scored
