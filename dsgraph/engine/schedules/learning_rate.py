"""The base class of learning rate schedules.

The rates of step k, counted from 0, are `rates(k - 1)`: a schedule steps after the optimizer, and `rates(-1)` is set
when it is created.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dsgraph.utils.errors import ConfigError

Rates = float | Sequence[float]


class LearningRateSchedule:
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
        """Return the rate of each group when `step` is the last step taken."""
        return self._rates(step)

    def _rates(self, step: int) -> list[float]:
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the current rates."""
        return self.rates(self.last_batch_iteration)

    get_last_lr = get_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one step, or to a given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def _set(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):  # a recorded graph reads it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the optimizer brings its rates itself."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _of_groups(self, value: Rates, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [float(value)] * groups
        if len(value) != groups:
            raise ConfigError(f"scheduler: {name} has {len(value)} values for {groups} groups of parameters")
        return [float(item) for item in value]


def check_steps(steps: object, name: str, *, least: int) -> None:
    """Check a number of steps in a configuration.

    Raises:
        ConfigError: It is not an integer, or less than `least`.
    """
    if not isinstance(steps, int) or steps < least:
        raise ConfigError(f"scheduler: {name} is {steps!r}; it takes a number of steps, {least} or more")
