"""A directory gets its name when everything in it is on the disk, and not at all after an error or when another process had it first."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_elastic.checkpoint import new_directory as module
from megatron_elastic.checkpoint.new_directory import new_directory, publish, publish_new, temporary_name
from megatron_elastic.errors import CheckpointError


def test_it_appears_when_the_block_ends(tmp_path):
    final = tmp_path / "deep" / "out"
    with new_directory(final) as directory:
        assert directory.is_dir() and list(directory.iterdir()) == [] and not final.exists()
        (directory / "below").mkdir()
        (directory / "below" / "file").write_text("text")
    assert (final / "below" / "file").read_text() == "text" and [path.name for path in final.parent.iterdir()] == ["out"]


def test_everything_is_on_the_disk_before_it_appears(tmp_path, monkeypatch):
    forced: list[tuple[str, bool]] = []
    monkeypatch.setattr(module, "force_to_disk", lambda path: forced.append((path.name, (tmp_path / "out").exists())))
    with new_directory(tmp_path / "out") as directory:
        (directory / "below").mkdir()
        (directory / "below" / "file").touch()
    assert sorted(forced[:3]) == [("below", False), ("file", False), ("out", False)] and forced[3:] == [(tmp_path.name, True)]


@pytest.mark.parametrize("error", [ValueError("ours"), CheckpointError("a tensor is missing"), KeyboardInterrupt()])
def test_an_error_leaves_nothing_and_stays_itself(tmp_path, error):
    with pytest.raises(type(error)) as caught, new_directory(tmp_path / "out") as directory:
        (directory / "file").touch()
        raise error
    assert caught.value is error and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"), (OSError("the disk is gone"), "the disk is gone")],
)
def test_a_disk_that_does_not_take_it_is_one_line(tmp_path, error, reason):
    with pytest.raises(CheckpointError, match=f"out' cannot be written: {reason}; free space") as caught, new_directory(tmp_path / "out"):
        raise error
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_touched(tmp_path):
    for name, make in (("directory", Path.mkdir), ("file", Path.touch)):
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name}' exists; choose another path"), new_directory(tmp_path / name):
            pytest.fail("the block was entered")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "file"]


@pytest.mark.parametrize("content", ["file", None])
def test_what_another_process_made_meanwhile_is_kept(tmp_path, content):
    with pytest.raises(CheckpointError, match="out' exists; choose another path"), new_directory(tmp_path / "out") as mine:
        (mine / "mine").touch()
        (tmp_path / "out").mkdir()
        if content is not None:
            (tmp_path / "out" / content).write_text("theirs")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ([] if content is None else [content])


@pytest.mark.parametrize("make", [lambda path: ((path).mkdir(), (path / "theirs").touch()), Path.touch], ids=["directory", "file"])
def test_what_appears_after_the_last_look_is_kept(tmp_path, monkeypatch, make):
    """Between the last check and the renaming; the system itself refuses then."""
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        make(target)
        return rename(self, target)

    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(CheckpointError, match="out' exists; choose another path"):
        publish_new(tmp_path / "mine", tmp_path / "out")
    assert (tmp_path / "mine").is_dir() and ((tmp_path / "out").is_file() or (tmp_path / "out" / "theirs").is_file())


def test_two_that_write_the_same_do_not_touch_each_other(tmp_path):
    with new_directory(tmp_path / "out") as first:
        (first / "first").touch()
        with pytest.raises(ValueError, match="second"), new_directory(tmp_path / "out") as second:
            (second / "second").touch()
            assert (first / "first").is_file()
            raise ValueError("second")
        assert (first / "first").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and [path.name for path in (tmp_path / "out").iterdir()] == ["first"]


def test_others_may_read_it_as_they_may_any_new_directory(tmp_path):
    (tmp_path / "ordinary").mkdir()
    with new_directory(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_publishing_replaces_what_has_the_name(tmp_path):
    for name in ("out", ".tmp-out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"file of {name}").touch()
    publish(temporary_name(tmp_path / "out"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "file of .tmp-out").is_file()
