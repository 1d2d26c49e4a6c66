"""A short run of the checkpoint trial; `python -m tests.trials.checkpoints` kills and damages more."""

from __future__ import annotations

import subprocess
import sys

import pytest


# For `make test-all` alone: it starts a dozen processes.
@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(500)
def test_nothing_wrong_is_loaded_and_nothing_whole_is_lost():
    command = [sys.executable, "-m", "tests.trials.checkpoints", "--kills", "8", "--damage", "24"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "8 kills during saving: 0 wrong" in ran.stdout
    assert "8 damaged files, 2 ranks, a pipeline: 0 wrong" in ran.stdout
