"""`examples/train_larger_than_memory.py` trains, and says what memory it took."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.full  # tests/engine/optimizers/test_offloading.py has each part
@pytest.mark.slow
def test_it_trains_from_disk_and_leaves_nothing_there(tmp_path):
    sizes = ["--width", "64", "--layers", "1", "--steps", "4", "--batch", "4", "--time", "32"]
    command = [sys.executable, "-m", "examples.train_larger_than_memory", "--folder", str(tmp_path), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert re.search(r"states \d MB a rank, memory \d+ MB", done.stdout)
    assert not list(tmp_path.rglob("parameters")) and not list(tmp_path.rglob("optimizer-state"))
