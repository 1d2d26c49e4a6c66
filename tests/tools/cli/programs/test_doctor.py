from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[4]


_DOCTOR = """\
import sys
from dsgraph.tools.cli.main import main
from dsgraph.tools.cli.programs import doctor

doctor._PATIENCE = {patience}
sys.exit(main(["doctor", "--json"]))
"""


def _doctor(*paths: Path, patience: float = 60, **variables: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", _DOCTOR.format(patience=patience)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])),
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout)
    answer["checks"] = {check["name"]: check for check in answer["checks"]}
    answer["abilities"] = {ability["name"]: ability["lacks"] for ability in answer["abilities"]}
    return done.returncode, answer


@pytest.mark.distributed
def test_all_is_well_where_the_tests_run():
    import torch

    code, answer = _doctor()
    assert code == 0, answer
    assert answer["works"]
    checks = answer["checks"]
    assert all(check["state"] == "ok" for check in checks.values() if check["needed"])
    assert checks["torch"]["found"].startswith(torch.__version__)
    assert checks["two ranks"]["found"] == "a sum over two processes is right"
    assert checks["dsgraph"]["found"].endswith(str(ROOT / "dsgraph"))
    assert "gloo" in checks["process groups"]["found"]
    assert answer["abilities"]['codegen "inductor" on CPUs'] == ""
    assert (answer["abilities"]["train on GPUs (NCCL)"] == "") == (
        torch.cuda.is_available() and torch.distributed.is_nccl_available()
    )


@pytest.mark.parametrize(
    ("source", "state", "advice"),
    [
        ("raise ModuleNotFoundError('No module named torch')", "missing", "ModuleNotFoundError: No module named torch"),
        ("raise OSError('libcudart.so: no such file')", "broken", "OSError: libcudart.so: no such file"),
        ("import os; os.abort()", "broken", "the check's process ended with exit code -6"),
        ("raise SystemExit(0)", "broken", "SystemExit: 0"),
        ("import os; os._exit(0)", "unknown", "not checked"),
    ],
)
def test_a_broken_torch_is_reported(source, state, advice, tmp_path):
    (tmp_path / "torch.py").write_text(source)
    code, answer = _doctor(tmp_path)
    assert code == 1
    found = answer["checks"]["torch"]
    assert (found["state"], found["advice"]) == (state, advice)
    assert answer["checks"]["two ranks"]["state"] == "unknown"
    assert answer["abilities"]['codegen "eager"'].startswith(f"torch {state}")
    assert answer["abilities"]["inspect dumps"] == ""


def test_a_torch_that_hangs_is_given_up_in_time(tmp_path):
    (tmp_path / "torch.py").write_text("import time; time.sleep(100)")
    started = time.monotonic()
    code, answer = _doctor(tmp_path, patience=2)
    assert code == 1
    late = [check for check in answer["checks"].values() if check["advice"].startswith("took more than 2 s: run")]
    assert len(late) == 1  # on a busy machine a check before torch
    assert time.monotonic() - started < 60  # the other checks take some of it


@pytest.mark.distributed
@pytest.mark.parametrize("broken", (pytest.param("tabulate", marks=pytest.mark.full), "sympy"))
def test_a_broken_package_is_reported_also_where_the_table_needs_it(broken, tmp_path):
    (tmp_path / f"{broken}.py").write_text("raise ImportError('broken')")
    code, answer = _doctor(tmp_path)
    assert code == 1
    assert answer["checks"][broken]["state"] == "broken"
    text = subprocess.run(
        [sys.executable, "-m", "dsgraph", "doctor"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert text.returncode == 1
    assert f"dsgraph does not work here: see {broken}" in text.stdout


def _without_torch(tmp_path: Path, **variables: str) -> dict[str, Any]:
    (tmp_path / "torch.py").write_text("raise ImportError('not needed here')")
    return _doctor(tmp_path, **variables)[1]


def test_a_compiler_that_is_not_there(tmp_path):
    answer = _without_torch(tmp_path, CXX="no-such-compiler")
    assert answer["checks"]["C++ compiler"]["state"] == "missing"
    assert "C++ compiler missing" in answer["abilities"]['codegen "inductor" on CPUs']


def test_a_compiler_that_cannot_compile(tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:2: error: omp.h: no such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    found = _without_torch(tmp_path, CXX=str(compiler))["checks"]["C++ compiler"]
    assert found["state"] == "broken"
    assert "error: omp.h: no such file" in found["advice"]


def test_a_folder_for_caches_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    found = _without_torch(tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "file" / "caches"))["checks"]["caches"]
    assert found["state"] == "broken"
    assert "set TORCHINDUCTOR_CACHE_DIR" in found["advice"]


def test_packages_that_are_optional_are_no_reason_to_fail(tmp_path):
    checks = _without_torch(tmp_path)["checks"]
    for name in ("dot", "matplotlib", "transformers", "deepspeed", "torchtitan"):
        assert not checks[name]["needed"]
        assert checks[name]["state"] == "ok" or checks[name]["advice"]
