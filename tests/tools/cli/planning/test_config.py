from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsgraph.tools.cli.document_config import page
from dsgraph.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[4]
CONFIG = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 1000, "sub_group_size": 1e9},
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_it_says_what_a_configuration_comes_to(path, capsys):
    assert main(["config", path, "--ranks", "4", "--parameters", "1e6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"] == {"step": 32, "micro": 4, "micro_batches": 2}
    assert found["config"]["zero_optimization"]["stage"] == 2
    assert "insert_zero_collectives" in found["passes"] and "delay_reduction_waits" not in found["passes"]
    assert found["bytes"] == {
        "parameters": 1e6,
        "gathered copies": 2e6,
        "gradients": 1e6,
        "optimizer state, as of Adam": 2e6,
    }
    assert found["notes"][0].startswith("zero_optimization.sub_group_size has no effect")


def test_it_is_readable(path, capsys):
    assert main(["config", path, "--ranks", "4"]) == 0
    text = capsys.readouterr().out
    assert "batch: 32 samples per step, 4 per micro-batch of a rank, 2 micro-batches" in text
    assert "bf16.enabled" in text and "passes: " in text


def test_bad_input_is_one_line(path, capsys):
    assert main(["config", path, "--ranks", "3"]) == 2
    assert capsys.readouterr().err.startswith("dsgraph: config: train_batch_size 32 is not")
    assert main(["config", "nowhere.json"]) == 2
    assert main(["config", path, "--ranks", "0"]) == 2


@pytest.mark.parametrize(
    ("params", "stage", "message"),
    [
        ({"freeze_steps": 3}, 0, "OneBitAdam does not support 'freeze_steps'; did you mean 'freeze_step'?"),
        ({"freeze_step": 3}, 2, "OneBitAdam with zero_optimization.stage 2"),
    ],
)
def test_it_checks_the_optimizer(params, stage, message, tmp_path, capsys):
    path = tmp_path / "ds.json"
    config = {**CONFIG, "optimizer": {"type": "OneBitAdam", "params": params}, "zero_optimization": {"stage": stage}}
    path.write_text(json.dumps(config))
    assert main(["config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_it_says_what_the_optimizer_leaves_to_defaults(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 4, "optimizer": {"type": "OneBitAdam"}}))
    assert main(["config", str(path)]) == 0
    assert "note: optimizer.params.freeze_step is not set: OneBitAdam trains as AdamW" in capsys.readouterr().out


def test_the_page_is_what_the_program_writes():
    assert (ROOT / "docs" / "reference" / "config.md").read_text() == page()
