"""`examples/generate.py` trains, exports, rounds and streams; a second run reads what the first one wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _run(folder: Path, *more: str) -> str:
    command = [sys.executable, "-m", "examples.generate", "--seconds", "1", "--tokens", "16", "--folder", str(folder)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_streams_text_of_a_model_that_it_has_trained(tmp_path):
    told, _, text = _run(tmp_path).partition("nats a byte\n")
    assert told.count("steps, loss") == 1
    assert len(_generated(text)) == len("def read(path):\n") + 16
    assert "29 layers of 8 bits" in text


@pytest.mark.full
def test_what_a_run_has_kept_gives_the_same_text_and_other_weights_without_training(tmp_path):
    first, again, other = _run(tmp_path), _run(tmp_path), _run(tmp_path, "--bits", "4")
    assert "nats a byte" not in again + other
    assert _generated(again) == _generated(first.partition("nats a byte\n")[2])
    assert "29 layers of 4 bits" in other


def _generated(text: str) -> str:
    """The text ahead of the engine's report, which begins with the prompt."""
    found = text.partition("\nprompt: 1 compiled")[0]
    assert found.startswith("def read(path):\n")
    return found


def test_too_long_a_text_is_refused():
    command = [sys.executable, "-m", "examples.generate", "--tokens", "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "take 1 to 256 together" in done.stderr
