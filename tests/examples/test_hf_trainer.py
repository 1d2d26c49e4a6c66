"""`examples/hf_trainer.py` as its user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]


def _run(folder: Path, steps: int, *more: str) -> float:
    settings = json.loads((ROOT / "examples" / "hf_trainer.json").read_text())
    config = folder / "ds.json"
    config.write_text(json.dumps({**settings, "dsgraph": {"codegen": "eager"}}))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    script = ["-m", "examples.hf_trainer", f"--steps={steps}", f"--output={folder}", f"--config={config}", *more]
    done = subprocess.run([*command, *script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(rf"final: step {steps}, held-out loss ([\d.]+)", done.stdout)
    assert found, done.stdout
    return float(found[1])


# tests/engine/integrations/test_trainer.py runs the same trainer in the small tier.
@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(900)  # two runs
@pytest.mark.parametrize("more", ((), ("--lora",)))
def test_it_learns_and_goes_on_from_its_checkpoint(tmp_path, more):
    first = _run(tmp_path, 50, *more)
    second = _run(tmp_path, 100, "--resume", *more)
    assert second < first < 5.55, "5.55 is a guess among 256 bytes"
