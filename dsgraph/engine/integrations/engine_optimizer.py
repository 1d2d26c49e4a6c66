"""The optimizer and the schedule of an engine, as accelerate sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import Optimizer

from dsgraph.engine.engine import Engine
from dsgraph.optim.hooks import evaluated
from dsgraph.utils.errors import EngineError


class EngineOptimizer(AcceleratedOptimizer):
    """The optimizer of an engine. It steps and drops gradients where an `AcceleratedOptimizer` does."""

    def __init__(self, engine: Engine) -> None:
        """Create the view of the optimizer of `engine`."""
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine, self._state = engine, engine.training_state
        self._is_accelerate_prepared = True

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update the parameters at the last micro-batch of a step; see `Engine.step`."""
        if self.gradient_state.sync_gradients:
            evaluated(closure)
            self._engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients at the last micro-batch of a step."""
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:
            self._state.has_begun_step = self._state.is_unscaled = False

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped, because its gradients were not finite."""
        return self._state.was_skipped


class EngineScheduler(AcceleratedScheduler):
    """The schedule of an engine."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps the schedule after its optimizer."""


class NoOptimizer(Optimizer):
    """The optimizer of a model that was prepared without one."""

    def __init__(self, _: Any) -> None:
        super().__init__([torch.empty(0)], {})
        self.param_groups.clear()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Raise an `EngineError` that names `accelerator.prepare(optimizer)`."""
        raise EngineError("step: the model was prepared without an optimizer: call accelerator.prepare(optimizer)")
