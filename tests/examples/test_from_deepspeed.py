"""`examples/from_deepspeed/train.py` as its user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _run(config: Path, folder: Path, steps: int) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = ["-m", "examples.from_deepspeed.train", f"--steps={steps}", f"--checkpoints={folder}"]
    done = subprocess.run(
        [*command, *script, "--deepspeed_config", str(config)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = re.search(rf"final: step {steps}, loss ([\d.]+)", done.stdout)
    assert found, done.stdout
    return float(found[1])


@pytest.mark.full  # tests/engine has each part
def test_it_learns_and_goes_on_from_its_checkpoint(tmp_path):
    settings = json.loads((ROOT / "examples" / "from_deepspeed" / "ds.json").read_text())
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({**settings, "dsgraph": {"codegen": "eager"}}))
    first = _run(config, tmp_path / "checkpoints", 10)
    second = _run(config, tmp_path / "checkpoints", 25)
    assert second < 0.8 * first
