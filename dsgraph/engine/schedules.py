"""Schedules of the learning rate, by the names and with the numbers of DeepSpeed's configuration.

The rates of step k, counted from 0, are `rates(k - 1)`: a schedule steps behind the optimizer, and `rates(-1)` is set
when it is made. Sources: Smith, "A disciplined approach to neural network hyper-parameters" (arXiv 1803.09820), for
`LRRangeTest` and `OneCycle`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.optim import Optimizer

from dsgraph.errors import ConfigError
from dsgraph.nearest import nearest

Rates = float | Sequence[float]


class Schedule:
    """A schedule that sets the rates of an optimizer's groups.

    Attributes:
        optimizer: The optimizer.
        last_batch_iteration: Steps taken so far, less one.
    """

    def __init__(self, optimizer: Optimizer, *, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self.base = [float(group["lr"]) for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set()

    def rates(self, step: int) -> list[float]:
        """The rate of each group when `step` is the last step taken."""
        return self._rates(step)

    def _rates(self, step: int) -> list[float]:
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """The rates that hold now."""
        return self.rates(self.last_batch_iteration)

    get_last_lr = get_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Goes on by one step, or to a given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; the optimizer brings its rates itself."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _of_groups(self, value: Rates, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [float(value)] * groups
        if len(value) != groups:
            raise ConfigError(f"scheduler: {name} has {len(value)} values for {groups} groups of parameters")
        return [float(item) for item in value]


def _warm(step: int, steps: int, kind: str) -> float:
    return math.log(step + 1) / math.log(steps) if kind == "log" else step / steps


def _check_warmup(steps: object, kind: object) -> int:
    if not isinstance(steps, int) or steps <= 0:
        raise ConfigError(f"scheduler: warmup_num_steps is {steps!r}; it takes a number of steps, 1 or more")
    if kind not in ("log", "linear"):
        raise ConfigError(f"scheduler: warmup_type is {kind!r}; it takes 'log' or 'linear'")
    return max(2, steps)


class WarmupLR(Schedule):
    """From the least rate to the largest in `warmup_num_steps` steps, by logarithm or line; then that one."""

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
        largest = optimizer.param_groups[0]["lr"] if warmup_max_lr is None else warmup_max_lr
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
    """As `WarmupLR`, and from the largest rate by a line to the least one at `total_num_steps`."""

    def __init__(self, optimizer: Optimizer, *, total_num_steps: int, warmup_max_lr: Rates = 0.001, **how: Any) -> None:
        self.total_steps = total_num_steps
        super().__init__(optimizer, warmup_max_lr=warmup_max_lr, **how)

    def _behind(self, step: int) -> float:
        return max(0.0, (self.total_steps - step) / max(1.0, self.total_steps - self.warmup_steps))


class WarmupCosineLR(Schedule):
    """The optimizer's own rate, times a warm-up and then half a wave of a cosine down to `cos_min_ratio`."""

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


class LRRangeTest(Schedule):
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
        self.least = self._of_groups(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def _rates(self, step: int) -> list[float]:
        interval = (step + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [rate * (1 + self.step_rate * interval) for rate in self.least]


class OneCycle(Schedule):
    """Up to the largest rate and down again, with the momentum against it; then a decay.

    The momentum is the first of the optimizer's betas, where it has them; the second becomes 0.99, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool | None = None,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        if cycle_first_stair_count or cycle_second_stair_count:
            raise ConfigError("scheduler: OneCycle has no stairs: leave out cycle_first_stair_count and the second")
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.cycle = float(cycle_first_step_size + second)
        self.top = cycle_first_step_size / self.cycle
        self.low, self.high = cycle_min_lr, cycle_max_lr
        self.decay_steps, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.low_momentum, self.high_momentum = cycle_min_mom, cycle_max_mom
        has_betas = "betas" in optimizer.defaults
        if cycle_momentum and not has_betas:
            raise ConfigError(
                f"scheduler: cycle_momentum is true, and {type(optimizer).__name__} has no betas: leave it out"
            )
        self.cycles_momentum = has_betas if cycle_momentum is None else cycle_momentum
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def _share(self, step: int) -> float:
        x = ((step + 1) / self.cycle) % 1.0
        return x / self.top if x <= self.top else (x - 1) / (self.top - 1)

    def _decayed(self, step: int, rate: float) -> float:
        """How much what follows the cycle has grown by."""
        return 1 + rate * (step - self.cycle + 1) / self.decay_steps if self.decay_steps else 1.0

    def _rates(self, step: int) -> list[float]:
        if step < 0:
            rate = self.low
        elif step < self.cycle:
            rate = self.low + (self.high - self.low) * self._share(step)
        else:
            rate = self.low / self._decayed(step, self.decay_lr_rate)
        return [rate] * len(self.optimizer.param_groups)

    def momentum(self, step: int) -> float:
        """The first of the optimizer's betas when `step` is the last step taken."""
        if step < 0:
            return self.low_momentum
        if step < self.cycle:
            return self.high_momentum - (self.high_momentum - self.low_momentum) * self._share(step)
        return self.high_momentum * self._decayed(step, self.decay_mom_rate)

    def _set(self) -> None:
        super()._set()
        if self.cycles_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (self.momentum(self.last_batch_iteration), 0.99)


SCHEDULES: Mapping[str, type[Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def schedule_class(kind: str, params: Mapping[str, Any]) -> type[Schedule]:
    """The class of schedule that a configuration's `scheduler` section names.

    Raises:
        ConfigError: An unknown schedule or parameter, or one that is missing.
    """
    if kind not in SCHEDULES:
        raise ConfigError(f"scheduler.type is {kind!r}{nearest(kind, SCHEDULES)}; known: {', '.join(SCHEDULES)}")
    made = SCHEDULES[kind]
    known = _parameters(made)
    for name in params:
        if name not in known:
            raise ConfigError(f"scheduler.params: {kind} has no {name!r}{nearest(name, known)}")
    missing = [name for name, needed in known.items() if needed and name not in params]
    if missing:
        raise ConfigError(f"scheduler.params: {kind} needs {missing[0]!r}")
    return made


def _parameters(kind: type[Schedule]) -> dict[str, bool]:
    """The names that a schedule takes, each with whether it has to be given."""
    found: dict[str, bool] = {}
    for base in kind.__mro__[:-1]:
        for name, parameter in inspect.signature(base).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                found.setdefault(name, parameter.default is parameter.empty)
    return found
