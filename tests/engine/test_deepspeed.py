"""DeepSpeed beside us: the same script and file on both, and its schedules against ours.

`full`: DeepSpeed is in the extra `peers` alone. Without it closed forms and plain loops hold the same places, in
`test_by_name.py` and `test_engine.py`.
"""

from __future__ import annotations

import difflib
import importlib.util

import pytest
import torch

from benchmarks import losses
from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.schedules.by_name import schedule_class

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: the extra `peers` has it"
    ),
]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def test_the_scripts_differ_in_their_import():
    lines = difflib.ndiff(*(losses.script(deepspeed=which).splitlines() for which in (False, True)))
    assert [line for line in lines if line[0] in "-+"] == ["- import dsgraph as deepspeed", "+ import deepspeed"]


# In bf16 masters begin as they are here and rounded there, and one rounding that falls otherwise goes on: stages 2 and
# 3 of DeepSpeed's are 1.5e-3 apart. At stage 0 its optimizer has made a step before the first
# (docs/guides/migrate-from-deepspeed.md).
LIMITS = {"fp32": dict.fromkeys(losses.STAGES, 1e-4), "bf16": {0: 3e-2, 1: 3e-3, 2: 3e-3, 3: 3e-3}}


@pytest.mark.distributed
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stage", losses.STAGES)
@pytest.mark.parametrize("dtype", losses.DTYPES)
def test_the_script_has_the_losses_of_deepspeed(stage, dtype):
    found = losses.compare(losses.config(stage, dtype))
    assert found["dsgraph"] < 0.5 * found["first"], "it learns"
    assert found["largest"] <= LIMITS[dtype][stage]


@pytest.mark.distributed
@pytest.mark.timeout(1500)
def test_low_precision_is_deepspeeds_until_a_rounding_falls_otherwise():
    found = losses.compare(losses.config(2, "bf16", rounded=True), rounded=True)
    assert found["early"] <= 1e-6


SCHEDULES = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 30}),
    ("WarmupLR", {"warmup_min_lr": [0.01, 0.02], "warmup_max_lr": [0.1, 0.3], "warmup_num_steps": 1}),
    ("WarmupLR", {"warmup_max_lr": 0.5, "warmup_num_steps": 50, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 150}),
    ("WarmupDecayLR", {"total_num_steps": 150, "warmup_num_steps": 20, "warmup_type": "linear", "warmup_min_lr": 1e-4}),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 20, "warmup_max_lr": 0.3}),
    ("WarmupCosineLR", {"total_num_steps": 150, "warmup_num_steps": 20}),
    ("WarmupCosineLR", {"total_num_steps": 150, "warmup_num_steps": 20, "warmup_type": "linear", "cos_min_ratio": 0.2}),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 20, "warmup_min_ratio": 0.1}),
    ("LRRangeTest", {}),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 7, "lr_range_test_step_rate": 3.0}),
    ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}),
    ("OneCycle", {"cycle_min_lr": [0.01, 0.02], "cycle_max_lr": [0.1, 0.3], "cycle_first_step_size": 30}),
    (
        "OneCycle",
        {
            **{"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 30, "cycle_second_step_size": 50},
            **{"decay_step_size": 3, "decay_lr_rate": 0.5, "decay_mom_rate": 0.001, "cycle_max_mom": 0.85},
        },
    ),
    (
        "OneCycle",
        {
            **{"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 30, "cycle_second_step_size": 70},
            **{"cycle_first_stair_count": 5, "cycle_second_stair_count": 7, "cycle_min_mom": [0.7, 0.8]},
        },
    ),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 40, "cycle_momentum": False}),
]


def _optimizer() -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.AdamW([{"params": weights[:1], "lr": 0.2}, {"params": weights[1:], "lr": 0.05}])


@pytest.mark.parametrize(("kind", "params"), SCHEDULES, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(SCHEDULES)])
def test_schedules_are_those_of_deepspeed(kind, params):
    from deepspeed.runtime import lr_schedules

    mine, other = _optimizer(), _optimizer()
    schedule = schedule_class(kind, params)(mine, **params)
    expected = getattr(lr_schedules, kind)(other, **params)
    for step in range(200):
        for group, their_group in zip(mine.param_groups, other.param_groups, strict=True):
            assert group["lr"] == pytest.approx(their_group["lr"], rel=1e-9, abs=1e-12), f"step {step}"
            assert group["betas"] == pytest.approx(their_group["betas"]), f"step {step}"
        schedule.step()
        expected.step()


# Keys whose default is left to the passes here: they have bounds of their own.
OWN_DEFAULTS = {"param_persistence_threshold", "reduce_bucket_size", "allgather_bucket_size"}


def test_defaults_are_those_of_deepspeed():
    from deepspeed.runtime import constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    mine = EngineConfig()
    for section, theirs in (
        (mine.fp16, DeepSpeedFP16Config()),
        (mine.bf16, DeepSpeedBF16Config()),
        (mine.zero_optimization, DeepSpeedZeroConfig()),
    ):
        for name, value in section.model_dump().items():
            if name not in OWN_DEFAULTS and name != "overlap_comm":  # theirs follows the stage
                if isinstance(value, dict):  # of sections, none is the same as one with device "none"
                    assert (value["device"], getattr(theirs, name)) == ("none", None), name
                    continue
                assert value == getattr(theirs, name), name
    for name in ("gradient_clipping", "steps_per_print", "dump_state", "communication_data_type", "train_batch_size"):
        assert getattr(mine, name) == getattr(constants, f"{name.upper()}_DEFAULT"), name
