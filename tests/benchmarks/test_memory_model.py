"""`benchmarks.memory_model`: what it computes from rows, and the simulation of a small model against the allocator."""

from __future__ import annotations

import json

import pytest

from benchmarks import memory_model
from benchmarks.memory import build_counter
from benchmarks.memory_model import checks, measure

COLUMNS = {
    *(
        "model",
        "stage",
        "codegen",
        "predicted_mb",
        "unfused_mb",
        "measured_mb",
        "error",
        "where",
        "compile_mb",
        "composition_mb",
    ),
}


def row(codegen: str, predicted: float, *, unfused: float = 100, stage: int = 3, compiling: float = 1) -> dict:
    return {
        "model": "gpt",
        "stage": stage,
        "codegen": codegen,
        "predicted_mb": predicted,
        "unfused_mb": unfused,
        "measured_mb": 100.0,
        "compile_mb": compiling,
    }


def test_checks_take_the_worst_in_either_direction():
    rows = [row("eager", 105), row("eager", 80, stage=1, compiling=7), row("inductor", 92, unfused=113)]
    eager, eager_compiling, fused, unfused, inductor_compiling = checks(rows)
    assert eager.value == pytest.approx(0.2) and not eager.ok and "2: gpt, stage 1" in eager.name
    assert eager_compiling.value == pytest.approx(0.07) and not eager_compiling.ok
    assert fused.value == pytest.approx(0.08) and fused.ok and "inductor" in fused.name
    assert unfused.value == pytest.approx(0.13) and not unfused.ok and "node by node" in unfused.name
    assert inductor_compiling.value == pytest.approx(0.01) and inductor_compiling.ok


def test_what_was_not_measured_is_not_reached():
    assert [check.value for check in checks([])] == [None] * 5 and not any(check.ok for check in checks([]))


@pytest.mark.parametrize("arguments", [["--models", "gpt,bart"], ["--stages", "4"], ["--codegens", "triton"]])
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        memory_model.main(arguments)
    assert error.value.code == 2
    assert f"{arguments[1].split(',')[-1]!r} is not one of" in capsys.readouterr().err


def test_without_a_compiler_nothing_counts(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert memory_model.main(["--quick"]) == 1
    assert "no C++ compiler" in capsys.readouterr().err


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    library = build_counter(tmp_path_factory.mktemp("counter"))
    if library is None:
        pytest.skip("no C++ compiler")
    return library


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_simulated_peak_is_within_ten_percent_of_the_measured_one(counter, stage):
    found = measure("gpt-small", stage, "eager", counter=counter)
    assert abs(found["error"]) < 0.10
    assert found["measured_mb"] > 5  # of which a parameter, its gradient and its state are 1.6: not that alone
    assert sum(found["composition_mb"].values()) == pytest.approx(found["predicted_mb"])
    assert 0 < found["compile_mb"] < 0.05 * found["measured_mb"]


@pytest.mark.full
@pytest.mark.distributed
def test_smoke_run_writes_the_schema(tmp_path):
    out = tmp_path / "out.json"
    assert memory_model.main(["--quick", "--models", "gpt-tiny", "--stages", "1", "--json", str(out)]) == 0
    read = json.loads(out.read_text())
    assert set(read) == {"rows", "checks", "machine"}
    (only,) = read["rows"]
    assert set(only) == COLUMNS and (only["model"], only["stage"], only["codegen"]) == ("gpt-tiny", 1, "eager")
    assert len(read["checks"]) == 5
