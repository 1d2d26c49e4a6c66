"""`examples/generate.py` trains, exports, rounds and streams; a second run reads what the first one wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import generate


def _run(folder: Path, *more: str) -> str:
    command = [sys.executable, "-m", "examples.generate", "--seconds", "1", "--tokens", "16", "--folder", str(folder)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_SMALL = """
from transformers import LlamaConfig, LlamaForCausalLM
from examples import generate
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
ends = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
generate.build = lambda: LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=1, **sizes, **ends))
generate.main()
"""


@pytest.mark.full  # tests/engine trains and exports, tests/inference rounds and streams
@pytest.mark.slow
def test_a_smaller_model_is_trained_and_streams_text(tmp_path):
    command = [sys.executable, "-c", _SMALL, "--seconds", "0.1", "--tokens", "8", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, _, text = done.stdout.partition("nats a byte\n")
    assert told.count("steps, loss") == 1
    assert len(_generated(text)) == len("def read(path):\n") + 8
    assert "8 layers of 8 bits" in text


@pytest.mark.full  # a smaller model above
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
    """Return the text before the engine's report, which begins with the prompt."""
    found = text.partition("\nprompt: 1 compiled")[0]
    assert found.startswith("def read(path):\n")
    return found


def test_too_long_a_text_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate", "--tokens", "300"])
    with pytest.raises(SystemExit) as ended:
        generate.main()
    assert ended.value.code == 2 and "take 1 to 256 together" in capsys.readouterr().err
