"""The interface of strategies, which compute the gradients of a step for an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor


class StepCalls(Protocol):
    """The methods of an engine that whole batches are made of. A class of the user may override them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model and the forward hooks of the engine."""

    def backward(self, loss: Tensor) -> Tensor:
        """Add the gradients of a micro-batch; see `Engine.backward`."""

    def step(self) -> None:
        """End a micro-batch; see `Engine.step`."""

    def zero_grad(self) -> None:
        """Drop all gradients of the current step."""


class StepStrategy(Protocol):
    """Computes the gradients of a step, and has `OptimizerStep` update the parameters with them.

    `MicroBatches` runs one program for each micro-batch. `PipelineSchedule` runs the stages of a pipeline.
    """

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_training: bool) -> Any:
        """Run the model; see `Engine.forward`."""

    def backward(self, loss: Tensor, *, retain_graph: bool, scale_wrt_gas: bool) -> Tensor:
        """Add the gradients of a micro-batch; see `Engine.backward`."""

    def end_micro_batch(self) -> None:
        """End a micro-batch; see `Engine.step`."""

    def without_reduction(self) -> AbstractContextManager[None]:
        """Add up gradients without reducing them; see `Engine.no_sync`."""

    def train_batch(self, data: Iterator[Any], engine: StepCalls) -> Tensor:
        """Run all micro-batches of a step and update the parameters; see `Engine.train_batch`."""

    def evaluate(self, data: Iterator[Any], engine: StepCalls, *, return_logits: bool) -> Any:
        """Return the model's output for the next micro-batch, without gradients; see `Engine.eval_batch`."""

    def discard(self, *, set_to_none: bool) -> None:
        """Drop all gradients of the current step."""

    def close(self) -> None:
        """Release the compiled model."""
