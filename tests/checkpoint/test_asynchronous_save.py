"""A checkpoint that is written during training is completed when the script ends, or its failure is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsgraph.checkpoint.checkpoint_files import read_about

pytestmark = pytest.mark.distributed

SCRIPT = """
import sys, torch, torch.distributed as dist, dsgraph
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "dsgraph": {"compile": False}}
engine = dsgraph.initialize(model=model, config=settings)[0]
engine.backward(engine(torch.ones(2, 256)).mean())
engine.step()
engine.save_checkpoint(sys.argv[1], "final", asynchronous=True)
"""
FAILS = """
import dsgraph.checkpoint.checkpoint_folder as folder
def fail(*_): raise OSError("the disk is gone")
folder.write_about = fail
"""
FAILS_LATE = """
import time, torch.distributed.checkpoint as dcp
def fail(*_):
    time.sleep(1)
    raise OSError("the disk is gone")
dcp.FileSystemWriter.write_data = fail
"""


def _run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ, check=True)


@pytest.mark.full  # one that fails has been waited for as well
def test_a_script_that_ends_has_written_its_checkpoint(tmp_path):
    ran = _run(tmp_path, SCRIPT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "latest"], ran.stderr
    assert read_about(tmp_path / "final")["client_state"] == {}


@pytest.mark.parametrize("fails", (FAILS, FAILS_LATE))
def test_what_could_not_be_written_is_said_at_the_end(tmp_path, fails):
    ran = _run(tmp_path, fails + SCRIPT)
    said = r"dsgraph: save [^ ]*final: (rank 0: )?the disk is gone; .*the checkpoint before stays the latest"
    assert re.search(said, ran.stderr)
    assert list(tmp_path.iterdir()) == []
