"""A dense model's scores by NVIDIA Model-Optimizer's own Minitron (release 0.40.0), as a ranking holds them. `score_directory.py` says what they are."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.modelopt_minitron.environment import modelopt_python
from megatron_elastic.axes import ElasticAxis
from megatron_elastic.export.sources import Source
from megatron_elastic.export.write import Options, write_member
from megatron_elastic.importance.folding import ScoresByLayer

SCRIPT = Path(__file__).resolve().parent / "score_directory.py"


def minitron_scores(source: Source, rows: Sequence[NDArray[np.integer[Any]]], folder: Path) -> ScoresByLayer:
    """Axis -> layer -> scores of hidden, ffn, heads and layers.

    rows: token ids, all of one length, each with the token after it, which is not a sample's. folder: where the model is written meanwhile.
    Raises UnsupportedError for a model that is no Llama, scripts.bootstrap.SetupError and subprocess.CalledProcessError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        model, tokens, out = (Path(temporary) / name for name in ("model", "rows.safetensors", "scores.safetensors"))
        write_member(source, None, model, Options(hugging_face=True, family="llama", dtype="float32"))
        save_file({"tokens": torch.from_numpy(np.stack([row[:-1] for row in rows]).astype(np.int64))}, tokens)
        score_directory(model, tokens, out)
        return by_axis(load_file(out))


def score_directory(model: Path, rows: Path, out: Path) -> None:
    """Run the script of that name in its environment. Raises subprocess.CalledProcessError when it fails, after its own message."""
    # Of the project the script sees nothing, not even its folder; it computes on the CPU, where torch's compiler does not work without a GPU.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run([str(part) for part in (modelopt_python(), SCRIPT, model, rows, out)], check=True, env=environ)


def by_axis(scores: dict[str, Tensor]) -> ScoresByLayer:
    """What the script writes, sorted by axis."""
    found: ScoresByLayer = {}
    for name, values in scores.items():
        axis, _, layer = name.partition("/")
        found.setdefault(ElasticAxis(axis), {})[int(layer) if layer else None] = values
    return found
