"""The end of a step: unscaled and clipped gradients, optimizer, schedule, loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable

from dsgraph.optim.hooks import hooks_of

from .monitoring.step_logger import StepLogger
from .techniques.eigenvalues import Gradients
from .training_state import TrainingState


class OptimizerStep:
    """Updates the parameters when all gradients of a step are there."""

    def __init__(self, state: TrainingState, logger: StepLogger) -> None:
        self._state, self._logger = state, logger
        hooks_of(state.optimizer).set_scale(state.loss_scale.scale)

    def run(self, gradients_again: Callable[[], Gradients] | None = None) -> None:
        """Update the parameters, and drop the gradients unless a loop does. All ranks call it together.

        Args:
            gradients_again: Return what recomputes the gradients of the last micro-batch, for the eigenvalues of
                quantization-aware training; None if the strategy cannot.

        Raises:
            LossScaleError: See `LossScale.update`.
        """
        state, hooks = self._state, hooks_of(self._state.optimizer)
        hooks.start_reading()
        is_finite = self._prepare()
        if is_finite:
            state.optimizer.step()
        else:
            hooks.finish()
        self._logger.measure_memory(state)
        if state.boundary is None:
            state.optimizer.zero_grad()
            state.is_unscaled = False
        state.counts.steps += 1
        state.counts.skipped += not is_finite
        state.was_skipped = not is_finite
        if is_finite and state.lr_scheduler is not None:
            state.lr_scheduler.step()
        if is_finite and state.quantized is not None:
            state.quantized.after_step(gradients_again)
        state.loss_scale.update(overflow=not is_finite)
        hooks.set_scale(state.loss_scale.scale)

    def _prepare(self) -> bool:
        """Unscale and clip the gradients. Return False if the step is to be skipped."""
        state, config = self._state, self._state.config
        checks = config.fp16.enabled or (config.bf16.enabled and config.bf16.check_grad_overflow)
        state.norm = state.norm if state.is_unscaled else None
        if hooks_of(state.optimizer).is_compressing:
            return not checks or math.isfinite(state.gradients().norm())
        if config.gradient_clipping or (checks and not state.is_unscaled):
            state.unscale(max_norm=config.gradient_clipping)
        return not checks or math.isfinite(state.norm or 0.0)
