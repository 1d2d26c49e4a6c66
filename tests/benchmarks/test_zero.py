"""`benchmarks.zero`: a smoke run, and what it computes from rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import zero
from benchmarks.systems import SYSTEMS, System, installed
from benchmarks.training import Workload

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = {"system", "world", "step_s", "peak_mb", "first_step_s", "wire_mb", "loss"}


def row(system: str, **columns: object) -> dict[str, object]:
    known = {"world": 2, "step_s": 1.0, "peak_mb": 300.0, "first_step_s": 1.0, "wire_mb": 100.0, "loss": 9.0}
    return {"system": system, **known, **columns}


ROWS = [
    row("single", step_s=2.0),
    row("single-compile", step_s=2.0, first_step_s=32.0),
    row("ddp", step_s=0.1, peak_mb=10.0),  # of another memory class: no peer of stage 3
    row("fsdp2", step_s=1.2, peak_mb=320.0),
    row("fsdp2-compile", step_s=1.0, peak_mb=300.0),
    row("deepspeed-3", step_s=1.5, peak_mb=400.0),
    row("dsgraph-0-eager", loss=9.000002),
    row("dsgraph-3", step_s=0.75, peak_mb=285.0, first_step_s=45.75, loss=8.999996),
]


def test_checks_are_computed_from_rows():
    time, memory, compiling, loss = zero.checks(ROWS, world=2)
    assert "of fsdp2, fsdp2-compile, deepspeed-3" in time.name and "2 ranks" in time.name
    assert (time.value, time.limit, time.better, time.ok) == (0.75, 0.80, "lower", True)
    assert (memory.value, memory.limit, memory.better, memory.ok) == (pytest.approx(0.95), 0.90, "lower", False)
    assert (compiling.value, compiling.limit, compiling.better, compiling.ok) == (1.5, 1.3, "lower", False)
    assert (loss.value, loss.limit, loss.better, loss.ok) == (pytest.approx(4e-6), 1e-5, "lower", True)
    assert "dsgraph-3" in loss.name


def test_every_dsgraph_stage_counts_in_the_loss_check():
    *_, loss = zero.checks([*ROWS, row("dsgraph-1-eager", loss=9.1)], world=2)
    assert loss.value == pytest.approx(0.1) and not loss.ok and "dsgraph-1-eager" in loss.name


def test_losses_are_compared_with_one_process_that_runs_the_same_kernels():
    rows = [row("single", loss=9.0), row("single-compile", loss=9.1), row("dsgraph-3-eager", loss=9.0)]
    *_, loss = zero.checks([*rows, row("dsgraph-3", loss=9.1)], world=2)
    assert loss.value == 0
    *_, loss = zero.checks([*rows, row("dsgraph-3", loss=9.0)], world=2)
    assert loss.value == pytest.approx(0.1)


def test_checks_say_which_peers_took_part():
    time, *_ = zero.checks([row("fsdp2"), row("dsgraph-3", step_s=0.5)], world=2)
    assert "of fsdp2 (" in time.name and time.value == 0.5


def test_what_was_not_measured_is_not_reached():
    for rows in ([], [row("dsgraph-3")], [row("ddp"), row("fsdp2", peak_mb=None)]):
        checks = zero.checks(rows, world=2)
        assert len(checks) == 4
        assert [check.value for check in checks] == [None] * 4 and not any(check.ok for check in checks)


def test_ratios_are_to_the_best_peer_of_the_memory_class():
    shown = {line["system"]: line for line in zero.with_ratios([*ROWS, row("dsgraph-1")])}
    assert shown["dsgraph-3"]["step/peer"] == 0.75
    assert shown["fsdp2"]["step/peer"] == pytest.approx(1.2)
    assert shown["dsgraph-0-eager"]["peak/peer"] == 30
    assert shown["dsgraph-1"]["step/peer"] is None  # deepspeed-1 did not take part
    assert shown["single"]["step/peer"] is None
    assert list(shown["ddp"])[:4] == ["system", "world", "step_s", "step/peer"]


def test_data_are_the_same_in_one_process():
    workload = Workload(world=3).quick()
    tokens, targets = workload.all_rows(5)
    assert tokens.shape == targets.shape == (6, 16)
    for rank in range(3):
        mine = workload.rows(5, rank)
        assert torch.equal(mine[0], tokens[2 * rank : 2 * rank + 2]) and torch.equal(mine[0][:, 1:], mine[1][:, :-1])
    assert not torch.equal(workload.rows(5, 0)[0], workload.rows(6, 0)[0])
    assert not torch.equal(tokens[:2], tokens[2:4])


def test_default_model_has_27_million_parameters():
    assert 26.5e6 < sum(param.numel() for param in Workload().build().parameters()) < 27.5e6


def test_a_heat_holds_whole_memory_classes():
    first, second = zero.heats(list(SYSTEMS))
    assert sorted([*first, *second]) == sorted(SYSTEMS)
    assert {"single", "single-compile", "fsdp2", "deepspeed-3", "dsgraph-3", "dsgraph-3-eager"} <= set(first)
    assert {"ddp", "deepspeed-1", "deepspeed-2", "dsgraph-0", "dsgraph-2-eager"} <= set(second)
    assert zero.heats(["ddp"]) == [["ddp"]]


def test_all_systems_of_the_comparison_run_by_default():
    systems = set(zero._parse([]).systems)
    assert systems >= {"ddp", "fsdp2", "fsdp2-compile", *(f"deepspeed-{stage}" for stage in (1, 2, 3))}
    assert systems >= {f"dsgraph-{stage}{suffix}" for stage in range(4) for suffix in ("", "-eager")}
    assert systems <= set(SYSTEMS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "ddp,fsdp9"], "no system called 'fsdp9'"),
        (["--steps", "3"], "--steps is 3; the loss after 20 steps needs 16 or more"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        zero.main(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_peers_that_are_not_installed_are_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert installed(["ddp", "deepspeed-3", "dsgraph-3"], SYSTEMS) == ["ddp", "dsgraph-3"]
    assert "deepspeed-3" in capsys.readouterr().out


def _set_up_wrongly(model: object) -> object:
    raise RuntimeError("no such luck")


def _set_up_to_fail_late(model: object) -> object:
    steps = []

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        steps.append(tokens)
        if len(steps) > zero.WARM_UP + 1:
            raise RuntimeError("tired")
        return torch.ones(())

    return step


@pytest.mark.full  # it takes long, and product code is not in it
@pytest.mark.distributed
def test_a_system_that_fails_is_named_and_the_others_are_kept(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(SYSTEMS, "broken", System(_set_up_wrongly))
    monkeypatch.setitem(SYSTEMS, "brittle", System(_set_up_to_fail_late))
    out = tmp_path / "out.json"
    code = zero.main(["--quick", "--systems", "broken,single,brittle", "--world", "1", "--json", str(out)])
    printed = capsys.readouterr()
    assert code == 1
    assert "FAILED broken: " in printed.err and "no such luck" in printed.err and "_set_up_wrongly" in printed.err
    assert "FAILED brittle: " in printed.err and "tired" in printed.err
    assert [line["system"] for line in json.loads(out.read_text())["rows"]] == ["single"]


@pytest.mark.full
@pytest.mark.distributed
def test_smoke_run_writes_the_schema(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.zero", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads(out.read_text())
    assert set(read) == {"rows", "checks", "machine"}
    assert [line["system"] for line in read["rows"]] == ["single", "ddp", "fsdp2", "dsgraph-3-eager"]
    for line in read["rows"]:
        assert set(line) == COLUMNS
        assert line["step_s"] > 0 and line["first_step_s"] > 0 and line["loss"] > 0
    by_name = {line["system"]: line for line in read["rows"]}
    assert by_name["single"]["wire_mb"] == 0 and by_name["single"]["world"] == 1
    model_mb = 4 * sum(param.numel() for param in Workload().quick().build().parameters()) / 1e6
    assert by_name["ddp"]["wire_mb"] == pytest.approx(model_mb)
    assert by_name["fsdp2"]["wire_mb"] > model_mb
    assert len(read["checks"]) == 4
    for check in read["checks"]:
        assert set(check) == {"name", "value", "limit", "better", "ok"}
    assert read["checks"][3]["value"] <= 1e-5 and read["checks"][3]["ok"] is True
    for name in by_name:
        assert name in done.stdout
