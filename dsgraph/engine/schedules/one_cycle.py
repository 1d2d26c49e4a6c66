"""1Cycle: Smith, "A disciplined approach to neural network hyper-parameters" (arXiv 1803.09820)."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from dsgraph.utils.errors import ConfigError

from .learning_rate import LearningRateSchedule, Rates, check_steps


class OneCycle(LearningRateSchedule):
    """The 1Cycle schedule: up to the largest rate and down again, with opposite momentum; then a decay.

    The momentum is the first of the optimizer's betas, if it has them; the second becomes 0.99, as in DeepSpeed. With a
    count of stairs, rate and momentum change in that number of equal steps in that half of the cycle.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool | None = None,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        first, second = cycle_first_step_size, cycle_second_step_size
        check_steps(first, "cycle_first_step_size", least=1)
        if second is not None:
            check_steps(second, "cycle_second_step_size", least=0)
        self.first, self.second = first, first if second is None else second
        self.cycle = self.first + self.second
        self.stairs = (cycle_first_stair_count, cycle_second_stair_count)
        self.low, self.high = (
            self._of_groups(cycle_min_lr, "cycle_min_lr"),
            self._of_groups(cycle_max_lr, "cycle_max_lr"),
        )
        self.decay_steps, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.low_momenta = self._of_groups(cycle_min_mom, "cycle_min_mom")
        self.high_momenta = self._of_groups(cycle_max_mom, "cycle_max_mom")
        has_betas = "betas" in optimizer.defaults
        if cycle_momentum and not has_betas:
            raise ConfigError(
                f"scheduler: cycle_momentum is true, and {type(optimizer).__name__} has no betas: leave it out"
            )
        self.cycles_momentum = has_betas if cycle_momentum is None else cycle_momentum
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def _share(self, step: int) -> float:
        """Return how far the rate is up, from 0 to 1."""
        place = (step + 1) % self.cycle
        upwards = place <= self.first
        way, size = (place, self.first) if upwards else (self.cycle - place, self.second)
        first, second = self.stairs
        stairs = first if upwards or second is None else second
        return math.floor(way * stairs / size) / stairs if stairs else way / size

    def _decayed(self, step: int, rate: float) -> float:
        """Return the factor of the decay after the cycle."""
        return 1 + rate * (step - self.cycle + 1) / self.decay_steps if self.decay_steps else 1.0

    def _rates(self, step: int) -> list[float]:
        if step < 0:
            return self.low
        if step < self.cycle:
            share = self._share(step)
            return [low + (high - low) * share for low, high in zip(self.low, self.high, strict=True)]
        return [low / self._decayed(step, self.decay_lr_rate) for low in self.low]

    def momenta(self, step: int) -> list[float]:
        """Return the first of each group's betas when `step` is the last step taken."""
        if step < 0:
            return self.low_momenta
        if step < self.cycle:
            share, pairs = self._share(step), zip(self.low_momenta, self.high_momenta, strict=True)
            return [high - (high - low) * share for low, high in pairs]
        return [high * self._decayed(step, self.decay_mom_rate) for high in self.high_momenta]

    def _set(self) -> None:
        super()._set()
        if self.cycles_momentum:
            momenta = self.momenta(self.last_batch_iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, 0.99)
