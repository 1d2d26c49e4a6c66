"""`benchmarks.engine` and `benchmarks.losses`: what they compute from rows, and a smoke run."""

from __future__ import annotations

import json

import pytest

from benchmarks import engine, losses

ROWS = [
    {"system": "bare-0", "stage": 0, "step_s": 1.0, "over": None},
    {"system": "engine-0", "stage": 0, "step_s": 1.01, "over": 1.01},
    {"system": "dsgraph-0", "stage": 0, "step_s": 0.6, "over": 0.6},
    {"system": "dsgraph-3", "stage": 3, "step_s": 0.8, "over": 0.8},
    {"system": "deepspeed-3", "stage": 3, "step_s": 1.0, "over": None},
    {"case": "a checkpoint, 1000 MB a rank", "share": 0.7},
    {"case": "a checkpoint during steps, 1000 MB a rank", "step_s": 2.0, "beside_s": 2.2, "over": 1.1},
]


def test_checks_are_computed_from_rows():
    overhead, script, saving, beside = engine.checks(ROWS)
    assert (overhead.value, overhead.limit, overhead.ok) == (1.01, 1.02, True) and "stages 0)" in overhead.name
    assert (script.value, script.limit, script.ok) == (pytest.approx(0.7), 0.75, True) and "0, 3" in script.name
    assert (saving.value, saving.limit, saving.ok) == (0.7, 0.80, False) and "1000 MB a rank" in saving.name
    assert (beside.value, beside.limit, beside.ok) == (1.1, 1.05, False)
    assert [check.value for check in engine.checks([])] == [None, None, None, None]


def test_the_largest_difference_counts():
    rows = [
        {"what": "stage 0", "dtype": "fp32", "largest": 1e-6},
        {"what": "stage 3", "dtype": "fp32", "largest": 2e-4},
        {"what": "stage 3", "dtype": "bf16", "largest": 0.0},
        {"what": "DeepSpeed's stage 2 and stage 3", "dtype": "bf16", "largest": 1e-3},
    ]
    full, half = losses.checks(rows)
    assert (full.value, full.ok) == (2e-4, False)
    assert (half.value, half.ok) == (0.0, True)


@pytest.mark.full  # the figures are of no use on a busy machine; `checks` has what can be wrong in them
@pytest.mark.slow
@pytest.mark.distributed
def test_a_smoke_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "out.json"
    assert engine.main(["--quick", "--stages", "3", "--steps", "2", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = {row.get("system", row.get("case")): row for row in found["rows"]}
    assert rows["engine-3"]["over"] == pytest.approx(rows["engine-3"]["step_s"] / rows["bare-3"]["step_s"])
    assert rows["engine-3"]["loss"] == pytest.approx(rows["bare-3"]["loss"], abs=1e-5)
    assert rows["a checkpoint, 10 MB a rank"]["share"] > 0
    assert rows["a checkpoint during steps, 10 MB a rank"]["stall_s"] > 0
    assert list(tmp_path.iterdir()) == [file]
