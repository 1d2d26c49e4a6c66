"""Schedules against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from dsgraph.engine.config.engine_config import OptimizerConfig
from dsgraph.engine.optimizers.optimizer_section import maker_of_section
from dsgraph.engine.schedules.by_name import schedule_class
from dsgraph.utils.errors import ConfigError


def _rates(kind, steps, *, lr=0.1, **params):
    """The rates with which an optimizer makes its steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = schedule_class(kind, params)(optimizer, **params)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return found


def test_warm_up():
    linear = _rates("WarmupLR", 7, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    assert linear == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1])
    log = _rates("WarmupLR", 6, warmup_min_lr=0.5, warmup_max_lr=1.0, warmup_num_steps=4)
    assert log == pytest.approx([0.5, *(0.5 + 0.5 * math.log(k) / math.log(4) for k in (1, 2, 3, 4)), 1])
    assert _rates("WarmupLR", 6, warmup_num_steps=2)[-1] == 0.1, "the optimizer's own rate"


def test_warm_up_and_decay():
    found = _rates("WarmupDecayLR", 9, total_num_steps=6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear")
    assert found == pytest.approx([0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])


def test_warm_up_and_cosine():
    found = _rates("WarmupCosineLR", 8, total_num_steps=6, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear")
    waves = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert found == pytest.approx([0.1 * ratio for ratio in (0, 0, 0.5, *waves, 0.1)])


@pytest.mark.parametrize(("staircase", "expected"), [(False, [1, 1.5, 2, 2.5, 3]), (True, [1, 1, 2, 2, 3])])
def test_range_test(staircase, expected):
    found = _rates(
        "LRRangeTest",
        5,
        lr_range_test_min_lr=1.0,
        lr_range_test_step_size=2,
        lr_range_test_staircase=staircase,
    )
    assert found == pytest.approx(expected)


def test_one_cycle():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=5.0)
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    schedule = schedule_class("OneCycle", params)(optimizer, **params, decay_lr_rate=1.0, decay_step_size=1)
    found = []
    for _ in range(9):
        group = optimizer.param_groups[0]
        found.append((group["lr"], round(group["betas"][0], 6)))
        schedule.step()
    rates = [1, 2, 3, 2.5, 2, 1.5, 1, 1 / 2, 1 / 3]
    momenta = [0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9]
    assert [rate for rate, _ in found] == pytest.approx(rates)
    assert [momentum for _, momentum in found] == pytest.approx(momenta)


def test_stairs_and_rates_of_each_group():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "lr": torch.tensor(0.5)}])
    params = {"cycle_min_lr": [0, 1], "cycle_max_lr": [1, 3], "cycle_first_step_size": 4, "cycle_first_stair_count": 2}
    schedule = schedule_class("OneCycle", params)(optimizer, **params)
    held = optimizer.param_groups[1]["lr"]
    found = []
    for _ in range(9):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        schedule.step()
    assert found == [[share, 1 + 2 * share] for share in (0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0)]
    assert optimizer.param_groups[1]["lr"] is held, "a recorded graph reads it"


def test_a_warm_up_ends_at_each_groups_own_rate():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 0.2}, {"params": weights[1:], "lr": 0.05}])
    schedule = schedule_class("WarmupLR", {})(optimizer, warmup_num_steps=2)
    for _ in range(4):
        schedule.step()
    assert schedule.get_lr() == [0.2, 0.05]


def test_adam_has_the_default_decay_of_the_one_that_is_named():
    for params, expected in (({}, 0.0), ({"torch_adam": True}, 0.01), ({"torch_adam": True, "weight_decay": 0.1}, 0.1)):
        make = maker_of_section(OptimizerConfig(type="AdamW", params=params), torch.nn.Linear(1, 1))
        assert make([{"params": [torch.nn.Parameter(torch.zeros(1))]}]).defaults["weight_decay"] == expected


def test_a_saved_schedule_goes_on():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    params = {"warmup_num_steps": 10, "warmup_type": "linear"}
    schedule = schedule_class("WarmupLR", params)(optimizer, **params)
    for _ in range(4):
        schedule.step()
    again = type(schedule)(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), **params)
    again.load_state_dict(schedule.state_dict())
    again.step()
    schedule.step()
    assert again.get_lr() == schedule.get_lr() == [pytest.approx(0.4)]


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("WarmupRL", {}, r"did you mean 'WarmupLR'\?"),
        (
            "WarmupLR",
            {"warmup_steps": 3},
            r"WarmupLR does not support 'warmup_steps'; did you mean 'warmup_num_steps'\?",
        ),
        ("WarmupDecayLR", {}, "WarmupDecayLR needs 'total_num_steps'"),
        ("OneCycle", {"cycle_min_lr": 1}, "OneCycle needs 'cycle_max_lr'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps is 0"),
        ("LRRangeTest", {"lr_range_test_min_lr": [1.0, 2.0]}, "2 values for 1 groups"),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0]}, "2 values for 1 groups"),
    ],
)
def test_what_is_wrong_is_named(kind, params, message):
    with pytest.raises(ConfigError, match=message):
        _rates(kind, 1, **params)


def test_a_momentum_that_is_not_there_cannot_be_cycled():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0}
    schedule_class("OneCycle", params)(optimizer, **params)
    with pytest.raises(ConfigError, match="cycle_momentum is true, and SGD has no betas"):
        schedule_class("OneCycle", params)(optimizer, **params, cycle_momentum=True)
