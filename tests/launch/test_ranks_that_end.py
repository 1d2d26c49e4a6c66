"""Where one rank of a script ends, the others end within seconds, and it is said which one and why."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, dsgraph
how, compiled = sys.argv[1:]
dist.init_process_group("gloo")
model = dsgraph.partition(torch.nn.Linear(8, 8), keep_whole_below=0)
run = torch.compile(model, backend="dsgraph", options={"codegen": "eager"}) if compiled == "compiled" else model
if dist.get_rank() == 1:
    print("ends at", time.time(), flush=True)
    if how == "raises":
        raise ValueError("no data for rank 1")
    if how == "dies":
        os._exit(3)
    sys.exit(0)
run(torch.ones(2, 8)).sum().backward()
"""


def _run(folder: Path, *arguments: str) -> tuple[str, int]:
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    started = time.time()
    ran = subprocess.run(
        [sys.executable, "-m", "dsgraph", "run", "--nproc", "2", "--dump", folder / "dump", script, "--", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = ran.stdout + ran.stderr
    ended = float(said.split("ends at ")[1].split()[0])
    seconds = time.time() - ended
    until = ended - started  # 4 s on an idle machine; rank 0 compiles after it, which a busy one slows as much
    assert seconds < max(15, 4 * until), "the time-out is 30 minutes"
    return said, ran.returncode


@pytest.mark.parametrize("compiled", (pytest.param("compiled", marks=pytest.mark.full), "uncompiled"))
def test_of_a_rank_that_raises_the_traceback_is_shown(tmp_path, compiled):
    said, code = _run(tmp_path, "raises", compiled)
    assert "ValueError: no data for rank 1" in said and "in <module>" in said
    assert "dsgraph: rank 1 failed first; it wrote the reason above" in said
    assert code != 0


@pytest.mark.full  # one that raises is named above
def test_a_rank_that_dies_is_named(tmp_path):
    said, code = _run(tmp_path, "dies", "compiled")
    assert "dsgraph: rank 1 failed first" in said and "exit code 3" in said
    assert code != 0


@pytest.mark.parametrize("compiled", (pytest.param("compiled", marks=pytest.mark.full), "uncompiled"))
def test_a_rank_that_ends_early_does_not_leave_the_others_waiting(tmp_path, compiled):
    said, code = _run(tmp_path, "ends", compiled)
    assert "rank 1 has ended" in said
    assert code != 0
