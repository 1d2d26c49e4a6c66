from __future__ import annotations

import json

import pytest

from benchmarks import kernel_rows, kernels
from benchmarks.kernel_rows import measure_kernels
from dsgraph.passes.kernels.registry import KERNELS


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.inductor
def test_a_quick_run_reports_every_figure(tmp_path):
    assert kernels.main(["--quick", "--models", "llama", "--json", str(tmp_path / "kernels.json")]) == 0
    report = json.loads((tmp_path / "kernels.json").read_text())
    figures = {check["name"]: check for check in report["checks"]}
    assert figures["llama: kernels substituted over present"]["value"] == 1.0
    assert figures["llama: largest float32 difference"]["ok"]
    assert figures["llama: bfloat16 error beyond plain bfloat16, in roundings"]["ok"]
    assert 0 < figures["llama: Inductor, step over plain"]["value"] < 10


@pytest.mark.full
@pytest.mark.inductor
def test_kernels_are_timed_one_by_one():
    rows = list(measure_kernels(device="cpu", quick=True))
    without_backward = {"decode_attention", "skinny_linear"}  # benchmarks/inference.py times them
    assert {row["kernel"] for row in rows} == {spec.name for spec in KERNELS if spec.triton} - without_backward
    assert all(row["ours_ms"] > 0 and row["over_fastest"] > 0 for row in rows)


@pytest.mark.inductor
def test_one_kernel_is_timed(monkeypatch):
    case = next(case for case in kernel_rows.cases() if case.name == "swiglu")
    monkeypatch.setattr(kernel_rows, "cases", lambda: [case])
    (row,) = measure_kernels(device="cpu", quick=True)
    assert row["kernel"] == "swiglu" and row["ours_ms"] > 0 and row["over_fastest"] > 0


def test_unknown_models_are_named():
    with pytest.raises(SystemExit):
        kernels.main(["--models", "llma"])
