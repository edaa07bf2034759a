"""What hangs ends with its stacks and a lost rank's exit code; what goes on is left alone; the heartbeat is never half a file.

Run: pytest tests/test_watchdog.py; a rank of two that hangs: pytest -m slow tests/train/test_faults.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic import watchdog
from megatron_elastic.errors import EXIT_RANK_LOST
from megatron_elastic.watchdog import HEARTBEAT_FILE, write_heartbeat

BODY = """
import threading, time
from megatron_elastic.watchdog import Watchdog

def waits_for_the_disk():
    time.sleep(60)

def another_thread():
    time.sleep(60)

threading.Thread(target=another_thread, daemon=True).start()
with Watchdog({seconds}, 3) as dog:
    for _ in range(8):
        time.sleep(0.1)
        dog.feed()
    {then}
time.sleep(0.7)
print("done")
"""


def run(seconds: float, then: str) -> Any:
    code = BODY.format(seconds=seconds, then=then)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)


def test_what_hangs_ends_with_the_stacks_of_all_threads() -> None:
    ended = run(0.6, "waits_for_the_disk()")
    assert ended.returncode == EXIT_RANK_LOST and ended.stdout == ""
    assert ended.stderr.startswith("error: rank 3 has made no progress for 0.6 s and is taken for hung; start again")
    assert "in waits_for_the_disk" in ended.stderr and "in another_thread" in ended.stderr


@pytest.mark.parametrize(("seconds", "then"), [(0.6, "pass"), (0, "time.sleep(0.1)")], ids=["fed, then over", "never"])
def test_what_goes_on_is_left_alone(seconds: float, then: str) -> None:
    ended = run(seconds, then)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_the_heartbeat_says_where_the_run_stands(tmp_path: Path, monkeypatch: Any) -> None:
    before = time.time()
    write_heartbeat(tmp_path, "short", 7, 4096)
    found = json.loads((tmp_path / HEARTBEAT_FILE).read_text(encoding="utf-8"))
    assert before <= found.pop("time") <= time.time()
    assert found == {"format_version": 1, "stage": "short", "step": 7, "tokens": 4096}
    assert [file.name for file in tmp_path.iterdir()] == [HEARTBEAT_FILE]

    # A kill in the middle of the next one: the disk takes half of it.
    def cut(self: Path, text: str, **_: Any) -> int:
        self.write_bytes(text.encode()[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(watchdog.Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        write_heartbeat(tmp_path, "short", 8, 8192)
    assert json.loads((tmp_path / HEARTBEAT_FILE).read_text(encoding="utf-8"))["step"] == 7
