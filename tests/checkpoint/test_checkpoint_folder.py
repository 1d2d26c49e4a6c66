"""A folder of checkpoints after writers that were killed, failed or ran at the same time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from dsgraph.checkpoint.checkpoint_files import encode_about
from dsgraph.checkpoint.checkpoint_folder import Unfinished, find_tag
from dsgraph.utils.errors import CheckpointError


def _save(folder: Path, tag: str, content: str) -> Path:
    unfinished = Unfinished.begin(folder, tag)
    (unfinished.path / "tensors").write_text(content)
    return unfinished.complete(encode_about({}))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_kill_between_two_renames_loses_nothing(tmp_path):
    _save(tmp_path, "a", "old").rename(tmp_path / ".a.replaced")
    (tmp_path / ".a.01234567.unfinished").mkdir()
    assert find_tag(tmp_path) == "a" and (tmp_path / "a" / "tensors").read_text() == "old"
    (tmp_path / "a").rename(tmp_path / ".a.replaced")
    _save(tmp_path, "b", "new")
    assert _names(tmp_path) == ["a", "b", "latest"] and find_tag(tmp_path) == "b"
    _save(tmp_path, "a", "newer")
    assert (tmp_path / "a" / "tensors").read_text() == "newer" and find_tag(tmp_path) == "a"
    assert _names(tmp_path) == ["a", "b", "latest"]


def test_a_missing_latest_is_no_first_start(tmp_path):
    assert find_tag(tmp_path) is None
    _save(tmp_path, "a", "")
    (tmp_path / "latest").unlink()
    assert find_tag(tmp_path) == "a", "a kill before the file"
    _save(tmp_path, "b", "")
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"'latest' is missing, and there are several checkpoints: .*a, b"):
        find_tag(tmp_path)
    assert find_tag(tmp_path, "a") == "a"


def _hold(folder: Path, started) -> None:
    held = Unfinished.begin(folder, "a")
    started.set()
    signal.pause()
    del held


def test_two_jobs_do_not_write_one_checkpoint_until_one_dies(tmp_path):
    fork = multiprocessing.get_context("fork")
    started = fork.Event()
    other = fork.Process(target=_hold, args=(tmp_path, started), daemon=True)
    other.start()
    assert started.wait(60)
    with pytest.raises(CheckpointError, match="a is being written by another job or engine"):
        Unfinished.begin(tmp_path, "a")
    _save(tmp_path, "b", "another tag")
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    _save(tmp_path, "a", "mine")
    assert _names(tmp_path) == ["a", "b", "latest"]


def test_what_is_given_up_is_removed_and_what_is_no_checkpoint_stays(tmp_path):
    Unfinished.begin(tmp_path, "a").give_up()
    assert _names(tmp_path) == []
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").touch()
    with pytest.raises(CheckpointError, match="data exists and is not a checkpoint"):
        Unfinished.begin(tmp_path, "data")
    assert _names(tmp_path) == ["data"]
