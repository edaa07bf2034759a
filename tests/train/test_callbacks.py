"""metrics.jsonl survives a kill in the middle of a line.

Run: pytest tests/train/test_callbacks.py
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from megatron_elastic.train.callbacks import METRICS_FILE, Record


def test_a_row_is_not_glued_to_a_line_that_was_cut(tmp_path: Path) -> None:
    stage = SimpleNamespace(name="short", global_batch_size=4, sequence_length=8, total_steps=9)
    recipe = SimpleNamespace(log=SimpleNamespace(tensorboard=False), stages=[stage])
    run = SimpleNamespace(parallel=SimpleNamespace(is_main=True), directory=tmp_path, recipe=recipe, stage=stage, stage_index=0)
    (tmp_path / METRICS_FILE).write_text('{"kind": "train", "sta', encoding="utf-8")
    Record(run).write("train", run, 3, {"loss": 1.5})  # pyright: ignore[reportArgumentType]
    broken, row = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert broken == '{"kind": "train", "sta'
    assert json.loads(row) == {"format_version": 1, "kind": "train", "stage": "short", "step": 3, "tokens": 96, "loss": 1.5}
