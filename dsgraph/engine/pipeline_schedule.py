"""The steps of a model with pipeline stages: the schedule runs all micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor

from dsgraph.batches import as_arguments
from dsgraph.compat.tensors import flatten_tree, unflatten_tree
from dsgraph.parallel.pipeline.pipelined import PipelinedModel
from dsgraph.utils.errors import EngineError

from .data import next_of_step
from .monitoring.step_logger import StepLogger
from .optimizer_step import OptimizerStep
from .step_strategy import StepCalls
from .training_state import TrainingState


class PipelineSchedule:
    """Runs whole steps of this rank's stages, and the optimizer after each."""

    def __init__(self, module: PipelinedModel, state: TrainingState, logger: StepLogger) -> None:
        self._module, self._state, self._logger = module, state, logger
        self._update = OptimizerStep(state, logger)

    def train_batch(self, data: Iterator[Any], engine: StepCalls) -> Tensor:
        """Run all micro-batches of a step. Return the mean of their losses over all ranks."""
        state, count = self._state, self._state.resolved.batch.micro_batches
        args, kwargs = as_arguments(self._next_batch(data, "train_batch"))
        self._logger.count_tokens(args, kwargs)
        self._module.scale_loss(state.loss_scale.scale)
        if state.layer_drop is not None:
            self._module.leave_out(state.layer_drop.keeps(state.counts))
        with self._logger.stopwatch.part("schedule"):
            loss = self._module.step(*args, **kwargs)
        self._logger.take_loss(loss)
        with self._logger.stopwatch.part("step"):
            self._update.run()
        self._module.zero_grad()  # also of parameters that the optimizer does not update
        state.counts.micro += count
        self._logger.after_step(state)
        return loss

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> Any:
        """Raise an error: no rank has the whole model."""
        _refuse("engine(...)")

    def backward(self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Raise an error: the schedule runs forward and backward of all micro-batches."""
        _refuse("engine.backward")

    def end_micro_batch(self) -> None:
        """Raise an error, as `backward`."""
        _refuse("engine.step")

    def without_reduction(self) -> AbstractContextManager[None]:
        """Raise an error, as `backward`."""
        _refuse("engine.no_sync")

    def evaluate(self, data: Iterator[Any], engine: StepCalls, *, return_logits: bool) -> Any:
        """Run the forward of a step's micro-batches in `eval()`. Return the mean of their losses over all ranks."""
        args, kwargs = as_arguments(self._next_batch(data, "eval_batch"))
        return self._module.evaluate(*args, return_outputs=return_logits, **kwargs)

    def _next_batch(self, data: Iterator[Any], call: str) -> Any:
        """Return the micro-batches of a step as one batch."""
        count = self._state.resolved.batch.micro_batches
        return _joined([next_of_step(data, number, count, call=call) for number in range(count)])

    def discard(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to 0."""
        if set_to_none:
            self._module.zero_grad()
            return
        for param in self._module.parameters():
            if param.grad is not None:
                param.grad.zero_()

    def close(self) -> None:
        """Keep the stages: they belong to the model."""


def _refuse(call: str) -> NoReturn:
    raise EngineError(
        f"{call} is not supported with pipeline stages, whose schedule runs all micro-batches of a step: call "
        "engine.train_batch(data)"
    )


def _joined(batches: Sequence[Any]) -> Any:
    """Return micro-batches as one batch: tensors with rows are concatenated; anything else must be equal in all."""
    leaves, spec = zip(*map(flatten_tree, batches), strict=True)
    joined = [_joined_leaf(same) for same in zip(*leaves, strict=True)]
    return unflatten_tree(joined, spec[0])


def _joined_leaf(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(values))
    for number, value in enumerate(values[1:], 1):
        is_same = torch.equal(value, first) if isinstance(first, Tensor) else bool(value == first)
        if not is_same:
            raise EngineError(
                f"the micro-batches of a step contain {first!r} and, in number {number}, {value!r}: with the section "
                "parallel, values without a dimension of rows must be equal in all of them. Give a tensor with a row "
                "for each sample"
            )
    return first
