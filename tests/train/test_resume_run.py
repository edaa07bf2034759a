"""A run killed with SIGKILL at any moment and started again ends bit for bit as the uninterrupted one: losses, weights, moments, router.

Run: pytest tests/train/test_resume_run.py
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.recipe import Recipe
from tests.train import harness
from tests.train.harness import Died, die, different, in_new_process, rows, stored, tiny_recipe

LAST = "stage-long"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any, data: Path) -> Path:
    """The directory of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    in_new_process(harness.train, tiny_recipe(directory, data))
    return directory


def killed_after_a_step(recipe: Recipe) -> None:
    """Train; die in the first elastic stage, right after step 2 was written down, with the last checkpoint after step 1."""
    from megatron_elastic.train import callbacks

    write = callbacks.Record.write

    def last_words(self: Any, kind: str, run: Any, step: int, values: Any) -> None:
        write(self, kind, run, step, values)
        if (kind, run.stage.name, step) == ("train", "short", 2):
            die()

    callbacks.Record.write = last_words
    harness.train(recipe)


def killed_while_writing(recipe: Recipe) -> None:
    """Train; die when 10 kB of the second checkpoint of the first elastic stage are on the disk."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    create = FileSystem.create_stream

    class Stream:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, content: Any) -> int:
            if self._file.tell() > 10_000:
                self._file.flush()
                die()
            return self._file.write(content)

    @contextmanager
    def create_stream(self: Any, path: Any, mode: str) -> Any:
        with create(self, path, mode) as stream:
            yield Stream(stream) if mode == "wb" and "step-short-0000004" in str(path) else stream

    FileSystem.create_stream = create_stream
    harness.train(recipe)


def killed_before_the_name(recipe: Recipe) -> None:
    """Train; die when that checkpoint is written whole but has its temporary name."""
    from megatron_elastic.checkpoint.sharded import save

    publish = save.publish
    save.publish = lambda temporary, directory: die() if directory.name == "step-short-0000004" else publish(temporary, directory)
    harness.train(recipe)


def killed_before_the_pointer(recipe: Recipe) -> None:
    """Train; die when that checkpoint has its name but `latest` still names the one before."""
    from megatron_elastic.checkpoint.sharded import save

    move = save.move_latest
    save.move_latest = lambda directory: die() if directory.name == "step-short-0000004" else move(directory)
    harness.train(recipe)


def killed_at_the_end_of_a_stage(recipe: Recipe) -> None:
    """Train; die before the end of the parent's stage is saved."""
    from megatron_elastic.checkpoint.sharded import save

    publish = save.publish
    save.publish = lambda temporary, directory: die() if directory.name == "stage-parent" else publish(temporary, directory)
    harness.train(recipe)


OUR_OWN_STEPS = (killed_before_the_name, killed_before_the_pointer, killed_at_the_end_of_a_stage)
"""Between two lines of checkpoint/sharded/save.py: what megatron-core and torch write is whole by then."""
CASES = {
    # The checkpoint a killed run must continue from, and what its directory holds besides.
    killed_after_a_step: ("step-short-0000002 (stage short, step 2)", []),
    killed_while_writing: ("step-short-0000002 (stage short, step 2)", [".tmp-step-short-0000004"]),
    killed_before_the_name: ("step-short-0000002 (stage short, step 2)", [".tmp-step-short-0000004"]),
    killed_before_the_pointer: ("step-short-0000002 (stage short, step 2)", ["step-short-0000004"]),
    killed_at_the_end_of_a_stage: ("step-parent-0000002 (stage parent, step 2)", [".tmp-stage-parent"]),
}


@pytest.mark.parametrize(
    "killed",
    [pytest.param(case, marks=[pytest.mark.one_release] if case in OUR_OWN_STEPS else []) for case in CASES],
    ids=lambda function: function.__name__,
)
def test_a_killed_run_ends_as_the_uninterrupted_one(killed: Any, whole: Path, data: Path, tmp_path: Path) -> None:
    recipe, (source, left) = tiny_recipe(tmp_path / "run", data), CASES[killed]
    with pytest.raises(Died, match="^-9$"):
        in_new_process(killed, recipe)
    checkpoints = tmp_path / "run" / "checkpoints"
    present = {path.name for path in checkpoints.iterdir()}
    assert present - {"latest", "step-parent-0000002", "stage-parent", "step-short-0000002"} == set(left)
    before = rows(tmp_path / "run")
    output = in_new_process(harness.train, recipe)
    assert output.splitlines()[0] == f"resumed from {checkpoints / source}"
    assert different(stored(checkpoints / LAST), stored(whole / "checkpoints" / LAST)) == []
    # A step that was taken twice has two rows, and they are equal.
    found, expected = rows(tmp_path / "run"), rows(whole)
    assert found[: len(before)] == before
    places = [(row["stage"], row["step"]) for row in expected]
    for row in found:
        assert row == expected[places.index((row["stage"], row["step"]))]
    assert found[-len(expected) + places.index((found[len(before)]["stage"], found[len(before)]["step"])) :] == found[len(before) :]
    assert {(row["stage"], row["step"]) for row in found} == set(places)
    evaluated = {(row["stage"], row["step"]): row for row in rows(tmp_path / "run", "eval")}
    assert evaluated == {(row["stage"], row["step"]): row for row in rows(whole, "eval")}
    assert (tmp_path / "run" / "family.json").read_bytes() == (whole / "family.json").read_bytes()
    assert not list(checkpoints.glob(".*")), "what the killed save left is still there"
