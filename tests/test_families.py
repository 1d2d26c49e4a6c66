from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("workers", ([], ["-n", "2"]))
def test_the_slowest_files_are_listed_first(tmp_path, workers):
    for name, seconds in (("quick", 0.0), ("slow", 0.2), ("slower", 0.5)):
        body = f"import time\ndef test_one(): time.sleep({seconds})\ndef test_two(): time.sleep({seconds})\n"
        (tmp_path / f"test_{name}.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-p", "tests.families", "-p", "no:cacheprovider", *workers, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"= \d+ s, \d+ s of workers; slowest files =", done.stdout)
    found = re.findall(r"^ +([\d.]+) s +\d+%  \S*test_(\w+)\.py$", done.stdout, re.M)
    assert [name for _, name in found] == ["slower", "slow", "quick"]
    assert float(found[0][0]) >= 1.0 and 0.4 <= float(found[1][0]) < 1.0
