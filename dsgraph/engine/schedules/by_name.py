"""Schedules of the learning rate, by the names and with the numbers of DeepSpeed's configuration.

Source of `LRRangeTest`: Smith, "A disciplined approach to neural network hyper-parameters" (arXiv 1803.09820).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Literal

from torch.optim import Optimizer

from dsgraph.utils.errors import ConfigError
from dsgraph.utils.nearest import nearest

from .learning_rate import LearningRateSchedule, Rates, check_steps
from .one_cycle import OneCycle


def _warm(step: int, steps: int, kind: str) -> float:
    return math.log(step + 1) / math.log(steps) if kind == "log" else step / steps


def _check_warmup(steps: object, kind: object) -> int:
    check_steps(steps, "warmup_num_steps", least=1)
    assert isinstance(steps, int)
    if kind not in ("log", "linear"):
        raise ConfigError(f"scheduler: warmup_type is {kind!r}; it takes 'log' or 'linear'")
    return max(2, steps)


class WarmupLR(LearningRateSchedule):
    """Warm-up from the least rate to the largest in `warmup_num_steps` steps, logarithmic or linear; then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self.warmup_steps = _check_warmup(warmup_num_steps, warmup_type)
        self.warmup_type = warmup_type
        largest = [float(group["lr"]) for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self.least = self._of_groups(warmup_min_lr, "warmup_min_lr")
        self.largest = self._of_groups(largest, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def _rates(self, step: int) -> list[float]:
        if step < 0:
            return self.least
        share = _warm(step, self.warmup_steps, self.warmup_type) if step < self.warmup_steps else self._behind(step)
        return [low + (high - low) * share for low, high in zip(self.least, self.largest, strict=True)]

    def _behind(self, step: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, followed by a linear decay from the largest rate to the least one at `total_num_steps`."""

    def __init__(self, optimizer: Optimizer, *, total_num_steps: int, warmup_max_lr: Rates = 0.001, **how: Any) -> None:
        self.total_steps = total_num_steps
        super().__init__(optimizer, warmup_max_lr=warmup_max_lr, **how)

    def _behind(self, step: int) -> float:
        return max(0.0, (self.total_steps - step) / max(1.0, self.total_steps - self.warmup_steps))


class WarmupCosineLR(LearningRateSchedule):
    """The optimizer's own rate times a warm-up, then times half a cosine wave down to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_steps = _check_warmup(warmup_num_steps, warmup_type)
        self.warmup_type = warmup_type
        self.total_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def _rates(self, step: int) -> list[float]:
        return [rate * self._ratio(step) for rate in self.base]

    def _ratio(self, step: int) -> float:
        if step < 0:
            return 0.0
        if step < self.warmup_steps:
            warm = _warm(step, self.warmup_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * warm
        progress = min(1.0, (step - self.warmup_steps + 1) / max(1, self.total_steps - self.warmup_steps))
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2


class LRRangeTest(LearningRateSchedule):
    """A rate that grows all the time, to find the largest one that trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        check_steps(lr_range_test_step_size, "lr_range_test_step_size", least=1)
        self.least = self._of_groups(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def _rates(self, step: int) -> list[float]:
        interval = (step + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [rate * (1 + self.step_rate * interval) for rate in self.least]


SCHEDULES: Mapping[str, type[LearningRateSchedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def schedule_class(kind: str, params: Mapping[str, Any]) -> type[LearningRateSchedule]:
    """Return the class of schedule that a configuration's `scheduler` section names.

    Raises:
        ConfigError: The schedule or a parameter is unknown, or a parameter is missing.
    """
    if kind not in SCHEDULES:
        raise ConfigError(f"scheduler.type is {kind!r}{nearest(kind, SCHEDULES)}; known: {', '.join(SCHEDULES)}")
    made = SCHEDULES[kind]
    known = _parameters(made)
    for name in params:
        if name not in known:
            raise ConfigError(f"scheduler.params: {kind} does not support {name!r}{nearest(name, known)}")
    missing = [name for name, needed in known.items() if needed and name not in params]
    if missing:
        raise ConfigError(f"scheduler.params: {kind} needs {missing[0]!r}")
    return made


def _parameters(kind: type[LearningRateSchedule]) -> dict[str, bool]:
    """Return the parameter names of a schedule, each with True if it is required."""
    found: dict[str, bool] = {}
    for base in kind.__mro__[:-1]:
        for name, parameter in inspect.signature(base).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                found.setdefault(name, parameter.default is parameter.empty)
    return found
