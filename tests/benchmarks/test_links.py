"""`benchmarks.links`: two hosts and the link between them, what is computed from rows, and a smoke run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import links
from benchmarks.namespaces import (
    INTERFACE,
    LinkError,
    Placement,
    interface_bytes,
    linked_hosts,
    parse_rate,
    require_hosts,
)
from benchmarks.systems import ACCUMULATING, SYSTEMS, compute_systems
from benchmarks.workers import WorkerError, Workers

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = [
    *("rate", "system", "world", "step_s", "bound_s", "step/bound", "peak_mb", "first_step_s"),
    *("wire_mb", "theory_mb", "link_mb", "link_mbit", "loss"),
]
ALL = {**SYSTEMS, **ACCUMULATING, **compute_systems(2)}
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def namespaces() -> None:
    try:
        require_hosts()
    except LinkError as reason:
        pytest.skip(str(reason))


def own_namespaces(process: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"dsgraph-{process}-")]


class Placed:
    def look(self) -> dict[str, object]:
        return {
            "interfaces": sorted(
                line.split(":")[0].strip() for line in Path("/proc/self/net/dev").open() if ":" in line
            ),
            "cores": os.sched_getaffinity(0),
            "threads": {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()},
        }

    def sent(self) -> int:
        before = interface_bytes()
        dist.barrier()
        return interface_bytes() - before


def refuse(rank: int) -> None:
    raise LinkError("no place here")


def row(rate: str, system: str, **columns: object) -> dict[str, object]:
    known = {"step_s": 1.0, "bound_s": 1.0, "step/bound": 1.0, "wire_mb": 100.0, "theory_mb": 100.0}
    return {"rate": rate, "system": system, **known, **columns}


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 1e9), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("56kbit", 56e3), ("unlimited", None)],
)
def test_rates(text, bits):
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["1", "fast", "0gbit", "-1gbit", "1 gbit", "1Gbit/s", ""])
def test_what_is_no_rate(text):
    with pytest.raises(ValueError, match="write one as 100mbit, 1gbit or unlimited"):
        parse_rate(text)


def test_theory_of_each_stage():
    sends = {name: links.theory_bytes(system, 100) for name, system in ALL.items()}
    assert sends["compute"] is None and sends["single"] is None
    assert [sends[name] for name in ("ddp", "dsgraph-1", "dsgraph-2", "fsdp2", "dsgraph-3")] == [
        100,
        100,
        100,
        150,
        150,
    ]
    assert [sends[f"dsgraph-{stage}-x4"] for stage in range(4)] == [100, 100, 250, 600]
    assert sends["ddp-x4"] == sends["dsgraph-2-once-x4"] == 100


def test_the_bound_is_the_longer_of_computing_and_sending():
    assert links.bound_seconds(0.5, 125e6, 1e9) == 1.0
    assert links.bound_seconds(2.0, 125e6, 1e9) == 2.0
    assert links.bound_seconds(0.5, 125e6, None) == 0.5
    assert links.bound_seconds(None, 125e6, 1e9) is None


def test_a_heat_has_its_reference():
    names = ["ddp", "ddp-x4", "dsgraph-3"]
    assert links.heats(names, ALL) == [["compute", "ddp", "dsgraph-3"], ["compute-x4", "ddp-x4"]]
    assert links.heats(["ddp-x4"], ALL) == [["compute-x4", "ddp-x4"]]


def test_checks_are_computed_from_rows():
    rows = [
        row("1gbit", "compute", **{"step/bound": None}),
        row("1gbit", "fsdp2", step_s=2.5),
        row("1gbit", "deepspeed-3", step_s=2.0),
        row("1gbit", "ddp", step_s=0.1),
        row("1gbit", "dsgraph-3", step_s=1.3, **{"step/bound": 1.3}, wire_mb=90.0),
        row("1gbit", "dsgraph-3-spare", step_s=0.8),
        row("1gbit", "ddp-x4", step_s=2.0),
        row("1gbit", "dsgraph-2-x4", step_s=3.0),
        row("1gbit", "dsgraph-2-once-x4", step_s=1.0),
        row("unlimited", "fsdp2", step_s=1.0),
        row("unlimited", "dsgraph-3", step_s=0.7, wire_mb=102.0),
    ]
    bound, peers, spare, micro, once, free, sent = sorted(
        links.checks(rows), key=lambda check: [1.20, 0.60, 1.0, 0.65, 1.01].index(check.limit)
    )
    assert (bound.value, bound.ok) == (1.3, False)
    assert (peers.value, peers.ok) == (0.65, False) and "of fsdp2, deepspeed-3" in peers.name
    assert (spare.value, spare.ok) == (0.4, True) and "dsgraph-3-spare step time over" in spare.name
    assert (micro.value, micro.ok) == (1.5, False) and "dsgraph-2-x4" in micro.name
    assert (once.value, once.ok) == (0.5, True) and "dsgraph-2-once-x4" in once.name
    assert (free.value, free.ok) == (0.7, False) and free.name.startswith("unlimited")
    assert (sent.value, sent.ok) == (pytest.approx(1.02), False)


def test_checks_of_what_did_not_run_are_left_out():
    assert links.checks([]) == []
    assert links.checks([row("1gbit", "ddp"), row("1gbit", "ddp-x4"), row("1gbit", "compute")]) == []
    other_rate = [row("100mbit", name) for name in ("compute", "fsdp2", "dsgraph-3", "ddp-x4", "dsgraph-2-x4")]
    assert [check.limit for check in links.checks(other_rate)] == [1.01]
    alone = [row("1gbit", "dsgraph-3", **{"step/bound": None}, wire_mb=None)]
    assert [(check.limit, check.ok) for check in links.checks(alone)] == [(1.01, False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "ddp,fsdp9"], "no system called 'fsdp9'"),
        (["--rates", "1gbit,fast"], "'fast' is no rate"),
        (["--steps", "0"], "--steps is 0; it must be 1 or more"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        links.main(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_all_rates_run_by_default():
    options = links._parse([])
    assert options.rates == ["100mbit", "1gbit", "10gbit", "unlimited"]
    assert {"ddp", "fsdp2", "fsdp2-compile", "fsdp2-split", "deepspeed-3", "dsgraph-3"} < set(options.systems)
    assert {"ddp-x4", "dsgraph-2-x4", "dsgraph-2-once-x4"} < set(options.systems)


@pytest.mark.parametrize(
    ("tools", "user", "message"),
    [
        ({}, 0, "there is no `ip`: install iproute2"),
        ({"ip": "/sbin/ip"}, 0, "there is no `tc`: install iproute2"),
        ({"ip": "/sbin/ip", "tc": "/sbin/tc"}, 1000, "which user 1000 may not make: run it as root"),
        ({"ip": "/sbin/ip", "tc": "/sbin/tc"}, 0, "`ip netns add dsgraph-"),
    ],
)
def test_where_no_hosts_can_be_made_one_line_says_so(monkeypatch, capsys, tools, user, message):
    run = subprocess.run
    monkeypatch.setattr("shutil.which", tools.get)
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("subprocess.run", lambda command, **more: run(["false"], **more))
    assert links.main(["--quick"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.full  # makes network namespaces
def test_a_place_that_cannot_be_had_is_an_error_of_the_workers():
    with pytest.raises(WorkerError, match=r"(?s)homeless: 1 of 1 ranks failed.*no place here"):
        Workers("homeless", Placed, world=1, place=refuse)


@pytest.mark.full  # makes network namespaces
@pytest.mark.distributed
def test_ranks_run_on_their_hosts(namespaces):
    with linked_hosts(1e9) as hosts:
        assert len(own_namespaces(os.getpid())) == 2
        with Workers("placed", Placed, world=2, place=Placement(hosts)) as workers:
            for found, host in zip(workers.call("look"), hosts, strict=True):
                assert found == {
                    "interfaces": [INTERFACE, "lo"],
                    "cores": {host.core},
                    "threads": {frozenset({host.core})},
                }
            assert all(sent > 0 for sent in workers.call("sent"))
    assert own_namespaces(os.getpid()) == []


@pytest.mark.full
@pytest.mark.distributed
def test_the_rate_holds_in_both_directions(namespaces):
    with (
        linked_hosts(200e6) as hosts,
        Workers("link", links.LinkProbe, world=2, place=Placement(hosts)) as probe,
    ):
        assert probe.call("megabits") == [pytest.approx(0.956 * 200, rel=0.04)] * 2


@pytest.mark.distributed
def test_hosts_are_removed_after_an_error(namespaces):
    with pytest.raises(ZeroDivisionError), linked_hosts(1e9):
        raise ZeroDivisionError
    assert own_namespaces(os.getpid()) == []


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_hosts_and_processes_are_removed_when_it_is_ended(namespaces, number):
    command = [sys.executable, "-m", "benchmarks.links", "--quick", "--systems", "ddp", "--steps", "100000"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, number, signal.SIG_DFL),  # a job in the background ignores SIGINT
    )
    try:
        assert process.stdout is not None
        while "ddp: first step" not in process.stdout.readline():
            assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert own_namespaces(process.pid) and len(children) >= 3
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, -signal.SIGKILL)
    assert own_namespaces(process.pid) == []
    until = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < until


@pytest.mark.full  # test_zero runs the same systems
@pytest.mark.distributed
def test_one_system_runs_and_is_written(namespaces, tmp_path):
    out = tmp_path / "out.json"
    quick = ["--quick", "--rates", "unlimited", "--steps", "1", "--systems", "dsgraph-3-eager"]
    assert links.main([*quick, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [line["system"] for line in rows] == ["compute", "dsgraph-3-eager"]
    assert all(list(line) == COLUMNS and line["step_s"] > 0 for line in rows)
    assert own_namespaces(os.getpid()) == []


@pytest.mark.full
@pytest.mark.distributed
def test_smoke_run_writes_the_schema(namespaces, tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.links", "--quick", "--rates", "unlimited", "--steps", "2"]
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads(out.read_text())
    systems = ["compute", "ddp", "dsgraph-3-eager", "compute-x4", "dsgraph-2-x4-eager"]
    assert [line["system"] for line in read["rows"]] == systems
    by_name = {line["system"]: line for line in read["rows"]}
    for line in read["rows"]:
        assert list(line) == COLUMNS
        assert line["step_s"] > 0 and line["link_mbit"] > 0 and line["rate"] == "unlimited"
    for name in ("compute", "compute-x4"):
        assert by_name[name]["world"] == 1 and by_name[name]["bound_s"] is None and by_name[name]["link_mb"] == 0
    ours = by_name["dsgraph-3-eager"]
    assert ours["bound_s"] == by_name["compute"]["step_s"] and ours["step/bound"] == ours["step_s"] / ours["bound_s"]
    assert ours["loss"] == pytest.approx(by_name["ddp"]["loss"], abs=1e-4)
    assert by_name["ddp"]["link_mb"] >= by_name["ddp"]["wire_mb"] == pytest.approx(by_name["ddp"]["theory_mb"])
