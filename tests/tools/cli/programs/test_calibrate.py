from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsgraph.compiler.costs.calibration_record import from_text, to_text
from dsgraph.compiler.costs.store import load_all, save
from dsgraph.tools.cli.programs.doctor import _calibration
from tests.compiler.costs.records import LINK, calibration

ROOT = Path(__file__).parents[4]
KINDS = {
    *(
        "all_gather_into_tensor",
        "gather_by_messages",
        "exchange_by_messages",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "all_reduce",
    ),
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nproc", "0"), "is '0'; it takes a whole number above 0"),
        (("--nproc", "many"), "is 'many'"),
        (("--seconds", "0"), "is '0'; it takes a number of seconds"),
        (("--seconds", "nan"), "is 'nan'"),
    ],
)
def test_bad_input(arguments, said, call):
    printed = call("calibrate", *arguments)
    assert printed.code == 2
    assert said in printed.err


def test_a_rank_starts_no_ranks(call, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    printed = call("calibrate", "--nproc", "2")
    assert printed.code == 2
    assert "torchrun has already started them: leave it out" in printed.err


def _start(cache: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.full  # tests/tools/calibration measure over ranks
@pytest.mark.distributed
@pytest.mark.slow
def test_it_measures_over_two_ranks_of_its_own_and_keeps_what_was_measured_before(tmp_path, monkeypatch):
    done = _start(tmp_path, "-m", "dsgraph", "calibrate", "--seconds", "0.3", "--json")
    assert done.returncode == 0, done.stderr
    answer = next(item for item in json.loads(done.stdout) if item["calibration"]["device_type"] == "cpu")
    path = Path(answer["path"])
    assert path.parent == tmp_path / "dsgraph" / "calibration"
    record = from_text(path.read_text())
    assert answer["calibration"] == json.loads(path.read_text())
    assert {link.kind for link in record.links} == KINDS
    assert {link.group for link in record.links} == {("gloo", 2, 1)}
    before = calibration(host=record.host, device=record.device, links=(LINK, replace(LINK, ranks=4)))
    path.write_text(to_text(before))

    again = _start(tmp_path, "-m", "dsgraph", "calibrate", "--seconds", "0.3")
    assert again.returncode == 0, again.stderr
    for part in ("matrix product, float32", "smallest kernel", f"written to {path}", *KINDS):
        assert part in again.stdout
    merged = from_text(path.read_text())
    assert merged.time != before.time
    assert {link.group for link in merged.links} == {("gloo", 2, 1), ("gloo", 4, 1)}
    assert len(merged.links) == len(KINDS) + 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_all(record.host) == [merged]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.slow
def test_under_torchrun_it_measures_over_the_ranks_that_are_there(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = _start(tmp_path, *torchrun, "-m", "dsgraph", "calibrate", "--seconds", "0.3", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)  # of the first rank alone
    assert {link["kind"] for link in answer[0]["calibration"]["links"]} == KINDS
    assert [path.name for path in (tmp_path / "dsgraph" / "calibration").iterdir()] == [
        Path(item["path"]).name for item in answer
    ]


@pytest.mark.full  # measures before it writes
@pytest.mark.distributed
@pytest.mark.slow
def test_a_cache_that_cannot_be_written_to_is_exit_code_1(tmp_path):
    (tmp_path / "dsgraph").write_text("")
    done = _start(tmp_path, "-m", "dsgraph", "calibrate", "--seconds", "0.3", "--nproc", "1")
    assert done.returncode == 1
    assert "cannot be written" in done.stdout and "XDG_CACHE_HOME" in done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_says_whether_there_is_a_calibration_and_of_when(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = _calibration()
    assert (found.state, found.is_needed) == ("missing", False)
    assert "dsgraph calibrate" in found.advice
    path = save(calibration(host=socket.gethostname()))
    assert _calibration().is_ok
    assert _calibration().found == f"{calibration().device}: {calibration().time}"
    path.write_text("{")
    found = _calibration()
    assert found.state == "broken"
    assert str(path) in found.advice
