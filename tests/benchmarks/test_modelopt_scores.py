"""NVIDIA Model-Optimizer's own Minitron scores of a Llama model are this package's `minitron` (slow).

Run: pytest tests/benchmarks/test_modelopt_scores.py (the first run on a machine makes an environment, two minutes)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from benchmarks.modelopt_minitron.scores import minitron_scores, score_directory  # noqa: E402
from megatron_elastic.axes import ElasticAxis  # noqa: E402
from megatron_elastic.export.load import load_model  # noqa: E402
from megatron_elastic.export.sources import open_source  # noqa: E402
from megatron_elastic.importance.collect import collect  # noqa: E402
from megatron_elastic.importance.folding import ScoresByLayer  # noqa: E402
from megatron_elastic.importance.text import rows_of_documents  # noqa: E402
from megatron_elastic.models.weights import generator_of  # noqa: E402
from megatron_elastic.testing.tiny import random_tensor  # noqa: E402

LAYERS, HIDDEN, FFN, HEADS, GROUPS, CHANNELS, WORDS, ROWS, LENGTH = 4, 48, 72, 6, 3, 10, 61, 5, 33
TOLERANCE = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Llama, its sizes all different, its weights moved off their start."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, head_dim=CHANNELS, max_position_embeddings=64, rms_norm_eps=3e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(random_tensor(name, tuple(tensor.shape), generator_of(0, name)))
    return model


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def documents(tokens: Tensor) -> list[Any]:
    """The rows, each with a token after it."""
    return [np.append(row.numpy(), 0) for row in tokens]


@pytest.fixture(scope="module")
def written(model: Any, tokens: Tensor, tmp_path_factory: Any) -> Path:
    """A directory with the model and the file of its scores."""
    folder = tmp_path_factory.mktemp("modelopt")
    model.save_pretrained(folder / "model")
    save_file({"tokens": tokens}, folder / "rows.safetensors")
    score_directory(folder / "model", folder / "rows.safetensors", folder / "scores.safetensors")
    return folder


@pytest.fixture
def ours(written: Path, documents: list[Any], parallel: Any) -> ScoresByLayer:
    """What this package finds for the same model on the same rows."""
    source = open_source(written / "model")
    rows = rows_of_documents(documents, LENGTH)
    return collect([load_model(source, parallel)], source.shape, parallel, rows, criterion="minitron").scores


def test_the_file_has_every_score_and_is_of_that_model(written: Path, model: Any, tokens: Tensor) -> None:
    scores = load_file(written / "scores.safetensors")
    shapes = {"hidden": (HIDDEN,), "layers": (LAYERS,)} | {f"ffn/{layer}": (FFN,) for layer in range(LAYERS)}
    shapes |= {f"heads/{layer}": (HEADS,) for layer in range(LAYERS)}
    assert {name: tuple(values.shape) for name, values in scores.items()} == shapes
    assert all(bool((values > 0).all()) and values.dtype is torch.float32 for values in scores.values())
    with safe_open(written / "scores.safetensors", "pt") as file:
        said = file.metadata()
    expected = float(model(tokens[:1], labels=tokens[:1]).loss.detach())
    assert float(said["loss"]) == pytest.approx(expected, rel=1e-5) and said["modelopt"] == "0.40.0"


def test_widths_are_ours(written: Path, ours: ScoresByLayer) -> None:
    scores = load_file(written / "scores.safetensors")
    torch.testing.assert_close(scores["hidden"].double(), ours[ElasticAxis.HIDDEN][None], rtol=TOLERANCE, atol=0.0)
    for layer in range(LAYERS):
        for axis in (ElasticAxis.FFN, ElasticAxis.HEADS):
            torch.testing.assert_close(scores[f"{axis.value}/{layer}"].double(), ours[axis][layer], rtol=TOLERANCE, atol=0.0)


def test_layers_are_one_minus_the_cosine(written: Path, model: Any, tokens: Tensor) -> None:
    with torch.no_grad():
        kept = model(tokens, output_hidden_states=True).hidden_states
        seen: list[Tensor] = []
        handle = model.model.layers[-1].register_forward_hook(lambda _, args, output: seen.append(output))
        model(tokens)
        handle.remove()
    streams = [*kept[:-1], *seen]  # the last of transformers' own is after the final norm
    pairs = zip(streams[:-1], streams[1:], strict=True)
    expected = torch.stack([(1 - torch.cosine_similarity(before, after, dim=-1)).mean(1).sum() for before, after in pairs])
    torch.testing.assert_close(load_file(written / "scores.safetensors")["layers"], expected, rtol=TOLERANCE, atol=1e-5)


def test_a_source_is_written_and_scored_as_its_directory(written: Path, documents: list[Any], tmp_path: Path) -> None:
    found = minitron_scores(open_source(written / "model"), documents, tmp_path)
    assert found.keys() == {ElasticAxis.HIDDEN, ElasticAxis.FFN, ElasticAxis.HEADS, ElasticAxis.LAYERS} and not list(tmp_path.iterdir())
    for name, values in load_file(written / "scores.safetensors").items():
        axis, _, layer = name.partition("/")
        torch.testing.assert_close(found[ElasticAxis(axis)][int(layer) if layer else None], values)
