"""Tags, the file `latest`, and checksums over every file."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsgraph.checkpoint import checkpoint_files
from dsgraph.checkpoint.checkpoint_files import (
    check_tag,
    encode_about,
    latest_line,
    latest_tag,
    read_about,
    write_about,
)
from dsgraph.utils.errors import CheckpointError


@pytest.mark.parametrize(
    "tag", ["latest", "Latest", "", ".", "..", ".a", "../a", "a/b", "a\\b", " a", "a\n", "a" * 201]
)
def test_names_that_are_no_tag_are_refused(tag):
    with pytest.raises(CheckpointError, match="tag "):
        check_tag(tag)


def test_other_names_and_numbers_are_tags():
    assert [check_tag(tag) for tag in (0, 10, 0.5, "epoch=1", "a b", "schön", "latest2")] == [
        *("0", "10", "0.5", "epoch=1", "a b", "schön", "latest2")
    ]


def test_each_damage_of_latest_is_found(tmp_path):
    latest = tmp_path / "latest"
    assert latest_tag(tmp_path) is None
    whole = latest_line("step10")
    assert whole.decode().strip() == "step10"
    for text in (whole, b"step10\n"):  # by hand
        latest.write_bytes(text)
        assert latest_tag(tmp_path) == "step10"
    damaged = [whole[:length] for length in range(len(whole))]
    damaged += [
        bytes([*whole[:n], whole[n] ^ 1 << bit, *whole[n + 1 :]]) for n in range(len(whole)) for bit in range(8)
    ]
    for tag in ("step10", "step11", "step"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "engine.json").touch()
    for content in damaged:
        latest.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"latest (is damaged|cannot be read)"):
            latest_tag(tmp_path)
    (tmp_path / "of_deepspeed").mkdir()
    latest.write_bytes(b"of_deepspeed")
    assert latest_tag(tmp_path) == "of_deepspeed"


def _written(path: Path) -> Path:
    path.mkdir()
    (path / "tensors").write_bytes(b"values")
    write_about(
        path, {**encode_about({"groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "keys": {4: 1}}), "tag": path.name}
    )
    return path


def test_a_thread_starts_no_others(tmp_path, monkeypatch):
    """From Python 3.12 on none can start while the interpreter waits for this one."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(checkpoint_files, "ThreadPool", refuse)
    with ThreadPoolExecutor(1) as executor:
        path = executor.submit(_written, tmp_path / "a").result()
    assert read_about(path)["keys"] == {4: 1}


def test_each_flipped_bit_of_engine_json_is_found(tmp_path):
    path = _written(tmp_path / "a")
    about = read_about(path)
    assert about["groups"] == [{"lr": 0.1, "betas": (0.9, 0.95)}] and about["keys"] == {4: 1}
    assert json.loads((path / "engine.json").read_text())["format"] == about["format"] == "dsgraph-engine-2"
    whole = (path / "engine.json").read_bytes()
    for place in range(len(whole)):
        for content in (whole[:place], bytes([*whole[:place], whole[place] ^ 1 << place % 8, *whole[place + 1 :]])):
            (path / "engine.json").write_bytes(content)
            with pytest.raises(CheckpointError, match=r"engine\.json is damaged"):
                read_about(path)


def test_what_is_missing_of_another_checkpoint_or_version_is_named(tmp_path):
    first, second = _written(tmp_path / "a"), _written(tmp_path / "b")
    (second / "tensors").write_bytes(b"others")
    with pytest.raises(CheckpointError, match="file tensors is damaged or missing: load another"):
        read_about(second)
    (second / "engine.json").write_bytes((first / "engine.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"or engine\.json is not its own, which is of 'a'"):
        read_about(second)
    (first / "engine.json").write_text('{"format": "dsgraph-engine-1", "files": {}}')
    with pytest.raises(CheckpointError, match="the format 'dsgraph-engine-1', and this version of dsgraph reads"):
        read_about(first)
    (first / "engine.json").unlink()
    with pytest.raises(CheckpointError, match=r"file engine\.json is missing"):
        read_about(first)
    with pytest.raises(CheckpointError, match="there is no checkpoint 'c'; known: b"):
        read_about(tmp_path / "c")
