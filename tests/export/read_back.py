"""Who reads members back: transformers, in a process that cannot find this project; and the masked family that they must agree with."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.hf import reader


def logits_in_a_fresh_process(texts: Mapping[Path, Tensor]) -> list[Tensor]:
    """Logits [batch, length, words] of Hugging Face directories, each on its tokens, by `tests/hf/reader.py`."""
    with tempfile.TemporaryDirectory() as scratch:
        given, found = Path(scratch) / "in.pt", Path(scratch) / "out.pt"
        torch.save({str(directory): tokens for directory, tokens in texts.items()}, given)
        ran = subprocess.run(
            [sys.executable, "-I", reader.__file__, str(given), str(found)],
            capture_output=True, text=True, timeout=240, check=False, cwd=scratch, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        return list(torch.load(found).values())


def family_logits(source: Path, budgets: Sequence[str], tokens: Tensor) -> list[Tensor]:
    """Logits of the whole family's weights, masked to the plan of each budget. source: anything that holds a family.

    Makes its own parallel layout: call it in a process of its own.
    """
    from megatron_elastic.elastic.attach import elasticize
    from megatron_elastic.export.load import load_model
    from megatron_elastic.export.sources import open_source
    from megatron_elastic.parallel import ParallelContext

    found, parallel = open_source(source), ParallelContext.initialize()
    assert found.space is not None
    model = load_model(found, parallel)
    handle = elasticize(model, found.space, parallel, found.shape)
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    logits = []
    for budget in budgets:
        with handle.use(found.plans[budget], "mask"), torch.no_grad():
            logits.append(model(tokens, positions, None)[..., : found.shape.vocab_size])
    return logits
