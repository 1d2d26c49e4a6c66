"""The steps of a model that each rank runs as one program: a forward and a backward for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dsgraph.batches import call_with
from dsgraph.optim.hooks import hooks_of
from dsgraph.partitioning.accumulation.accumulate import accumulate, discard
from dsgraph.partitioning.forward_inputs import cast_floating, move_inputs
from dsgraph.utils.errors import EngineError

from .data import next_of_step
from .model_outputs import Again, loss_of
from .monitoring.step_logger import StepLogger
from .optimizer_step import OptimizerStep
from .optimizers.step_moment import stepping
from .step_strategy import StepCalls
from .techniques.eigenvalues import Gradients
from .training_state import TrainingState


class MicroBatches:
    """Runs forward and backward of each micro-batch, and the optimizer after the last one of a step.

    Until then gradients are accumulated as by `dsgraph.accumulate`.
    """

    def __init__(
        self,
        runs: Callable[..., Any],
        state: TrainingState,
        logger: StepLogger,
        *,
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        """Set up from parts.

        Args:
            runs: The model, compiled if the configuration says so.
            state: The model, the optimizer and the progress.
            logger: Observes each step.
            device: The device of the model; inputs on the CPU are moved there.
            dtype: Dtype of floating-point inputs; None leaves them as they are.
        """
        self._runs, self._state, self._logger, self._device, self._dtype = runs, state, logger, device, dtype
        self._module: nn.Module = state.module
        self._update = OptimizerStep(state, logger)
        self._waiting = ExitStack()
        self._is_waiting = self._never_reduces = self._ran_backward = False
        self._again: Again | None = None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> Any:
        """Run the model. In training, what follows belongs to a micro-batch of the current step."""
        runs, state = self._runs, self._state
        args, kwargs = cast_floating(move_inputs((args, kwargs), self._device), self._dtype)
        is_step = is_training and torch.is_grad_enabled()
        if state.layer_drop is not None:
            kwargs = {**kwargs, **state.layer_drop.begin(state.counts)} if is_step else kwargs
            state.partition.step.plans.kind = state.layer_drop.left_out if is_step else None
        if not is_step:
            return runs(*args, **kwargs)
        if state.quantized is not None and state.quantized.blocks:
            self._again = Again(lambda: runs(*args, **kwargs))
        with self._logger.forward(state, args, kwargs):
            self._wait_if_needed()
            return runs(*args, **kwargs)

    def _wait_if_needed(self) -> None:
        """Enter `accumulate` for a micro-batch that is not the last; leave it for a forward without a backward."""
        waits = self._never_reduces or not self._state.is_last_micro_batch()
        if self._is_waiting and not waits:
            self._leave()
        elif waits and not self._is_waiting:
            self._waiting.enter_context(accumulate(self._module, reduce_once=self._never_reduces or None))
            self._is_waiting = True
        is_compressing = hooks_of(self._state.optimizer).is_compressing
        if not waits and is_compressing and not self._state.config.dsgraph.compile:
            with accumulate(self._module):  # a momentum takes one gradient, even if a forward reads a parameter twice
                pass

    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of a micro-batch. Return the loss, divided by the number of micro-batches."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise EngineError(f"backward takes a loss, which is one number, and found {found}")
        if not loss.requires_grad:
            raise EngineError("backward: the loss has no graph: run engine(...) with gradients enabled")
        state = self._state
        if state.is_unscaled and state.loss_scale.scale != 1:
            raise EngineError("backward: fp16 gradients were clipped: clip after a step's last, or call zero_grad()")
        share = loss / state.resolved.batch.micro_batches if scale_wrt_gas else loss
        self._logger.take_loss(share, begins=not state.has_begun_step)
        try:
            scaled = share if state.loss_scale.scale == 1 else share.float() * state.loss_scale.scale
            may_be_last = not retain_graph and not self._never_reduces and state.boundary is None
            is_last = may_be_last and state.is_last_micro_batch()
            beside = stepping(state.optimizer, state.config, is_last=is_last)
            with self._logger.stopwatch.part("backward"), beside:
                scaled.backward(retain_graph=retain_graph)
        finally:
            self._leave()
            state.has_begun_step = self._ran_backward = True
            state.is_unscaled = False
        state.counts.micro += state.boundary is not None
        return share

    def _leave(self) -> None:
        self._is_waiting = False
        self._waiting.close()

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Add up gradients inside the block without reducing them."""
        zero = self._state.partition.zero
        if not zero.may_reduce_once:
            raise EngineError(
                f"no_sync: at stage {zero.number} no rank holds a full parameter whose gradient it could keep: set "
                "gradient_accumulation_steps instead, or zero_optimization.stage to 2"
            )
        self._never_reduces = True
        try:
            yield
        finally:
            self._never_reduces = False

    def end_micro_batch(self) -> None:
        """End a micro-batch; after the last one of a step, update the parameters."""
        state = self._state
        if self._never_reduces:
            raise EngineError(
                "step inside no_sync: call it after the block, when a backward outside has reduced the gradients"
            )
        is_looped = state.boundary is not None
        is_last = is_looped or state.is_last_micro_batch()
        is_known = self._ran_backward or (is_looped and (state.is_unscaled or state.loss_scale.scale == 1))
        if is_last and not is_known and any(param.grad is not None for param in self._module.parameters()):
            raise EngineError(
                "step: the gradients are not those of engine.backward(loss) or accelerator.backward(loss), which "
                "scales the loss and divides it by the micro-batches of a step: call it in place of loss.backward()"
            )
        if is_last:
            with self._logger.stopwatch.part("step"):
                self._update.run(self._gradients_again)
        state.counts.micro += not is_looped
        state.has_begun_step, self._ran_backward = not is_last, self._ran_backward and not is_last
        if is_last:
            self._logger.after_step(state)

    def _gradients_again(self) -> Gradients:
        assert self._again is not None
        return self._again.gradients_of(self._module, scale=self._state.loss_scale.scale)

    def train_batch(self, data: Iterator[Any], engine: StepCalls) -> Tensor:
        """Run all micro-batches of a step. Return the mean of their losses on this rank."""
        if self._state.boundary is not None:
            raise EngineError("train_batch: the loop of an accelerator calls backward and step: write such a loop")
        count = self._state.resolved.batch.micro_batches
        total = torch.zeros((), device=self._state.partition.parameters[0].param.device)
        for number in range(count):
            try:
                batch = next_of_step(data, number, count)
            except EngineError:
                engine.zero_grad()
                self._state.counts.micro -= number
                raise
            loss = loss_of(call_with(engine, batch))
            total += engine.backward(loss).detach()
            engine.step()
        return total

    def evaluate(self, data: Iterator[Any], engine: StepCalls, *, return_logits: bool) -> Any:
        """Return the model's output for the next micro-batch, without gradients; with its loss if asked for."""
        with torch.no_grad():
            output = call_with(engine, next(data))
        return (loss_of(output), output) if return_logits else output

    def discard(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients of the current step. The count of micro-batches goes on."""
        state = self._state
        discard(self._module)
        state.optimizer.zero_grad(set_to_none)
        self._module.zero_grad(set_to_none)  # also of parameters that the optimizer does not update
        state.has_begun_step = state.is_unscaled = self._ran_backward = False

    def close(self) -> None:
        """Release the compiled model; the partitioned model runs uncompiled."""
        self._leave()
        self._runs = self._module
