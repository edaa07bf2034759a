"""A directory that is read back is the model that it holds, whatever transformers' plain-PyTorch mixer does besides; what it cannot read is one line.

Run: pytest tests/hf/test_read_back.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_elastic.errors import CheckpointError
from megatron_elastic.export.read_back import TransformersModel

pytest.importorskip("transformers")
from tests.hf.test_families import our_logits, read  # noqa: E402
from tests.hf.tiny_models import LENGTH, tiny_model, tokens_of  # noqa: E402

NAME = "nemotron_h, dense"


def test_small_time_steps_are_not_raised(tmp_path: Path, parallel: Any) -> None:
    model = tiny_model(NAME)
    with torch.no_grad():
        for own, tensor in model.named_parameters():
            if own.endswith("dt_bias"):
                tensor.sub_(9.0)  # a step of about 1e-4, where fresh weights have 1e-3 and more
        clamped = model(tokens_of(NAME), use_cache=False).logits
    model.save_pretrained(tmp_path)
    imported = read(tmp_path)
    ours, _ = our_logits(imported.shape, imported.ours, tokens_of(NAME), parallel)
    assert float((ours - clamped).abs().max()) > 1e-3, "raising the time steps does not matter: the test proves nothing"
    assert float((ours - TransformersModel(tmp_path, LENGTH).logits(tokens_of(NAME))).abs().max()) < 1e-5


def test_a_config_that_transformers_refuses_is_one_line(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 5}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="^transformers cannot read .*not a multiple of the number of attention heads") as caught:
        TransformersModel(tmp_path, LENGTH)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="^transformers cannot read ") as caught:
        TransformersModel(tmp_path, LENGTH)
    assert "\n" not in str(caught.value)
