from __future__ import annotations

import pytest

from dsgraph.engine.config.engine_config import Fp16Config
from dsgraph.engine.loss_scale import LossScale
from dsgraph.utils.errors import LossScaleError


def _trace(overflows, **config):
    scale = LossScale.of(Fp16Config(enabled=True, initial_scale_power=4, **config))
    found = []
    for overflow in overflows:
        scale.update(overflow=overflow == "x")
        found.append(scale.scale)
    return found


# Written out by hand from the rule: the scale halves at the `hysteresis`-th overflow, and doubles after a whole window.
@pytest.mark.parametrize(
    ("overflows", "config", "expected"),
    [
        ("xx.", {"hysteresis": 1}, [8, 4, 4]),
        ("xx.x", {"hysteresis": 2}, [16, 8, 8, 4]),
        ("x.x", {"hysteresis": 2}, [16, 16, 8]),
        ("x.x", {"hysteresis": 2, "consecutive_hysteresis": True}, [16, 16, 16]),
        ("......", {"loss_scale_window": 2}, [16, 16, 32, 32, 64, 64]),
        ("x...x", {"loss_scale_window": 2, "hysteresis": 1}, [8, 8, 8, 16, 8]),
    ],
)
def test_the_dynamic_scale_follows_its_rule(overflows, config, expected):
    assert _trace(overflows, **config) == expected


def test_a_fixed_scale_stays():
    assert _trace("xx..", loss_scale=128) == [128] * 4


def test_an_overflow_at_the_least_scale_is_an_error():
    with pytest.raises(LossScaleError, match=r"least loss scale, 4 \(fp16.min_loss_scale\)"):
        _trace("xxxx", hysteresis=1, min_loss_scale=4)


def test_a_saved_state_goes_on_alike():
    one = LossScale.of(Fp16Config(enabled=True, loss_scale_window=3))
    one.update(overflow=True)
    other = LossScale.of(Fp16Config(enabled=True, loss_scale_window=3))
    other.load_state_dict(one.state_dict())
    for overflow in (False, False, False, False, True):
        one.update(overflow=overflow)
        other.update(overflow=overflow)
    assert one == other


def test_a_resumed_run_keeps_its_own_rule():
    saved = LossScale.of(Fp16Config(enabled=True, loss_scale_window=3)).state_dict()
    resumed = LossScale.of(Fp16Config(enabled=True, loss_scale_window=7, initial_scale_power=2))
    resumed.load_state_dict(saved)
    assert (resumed.scale, resumed.window) == (2**16, 7)
    fixed = LossScale.of(Fp16Config(enabled=True, loss_scale=8))
    fixed.load_state_dict(saved)
    assert fixed.scale == 8
