"""The steps of a layout without pipeline stages: `MicroBatches` that return what a pipeline does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsgraph.batches import call_with, joined_values
from dsgraph.compat.tensors import flatten_tree, unflatten_tree
from dsgraph.inductor_ext import Ranks, sum_over

from .data import next_of_step
from .micro_batches import MicroBatches
from .model_outputs import loss_of
from .step_strategy import StepCalls


class ParallelBatches(MicroBatches):
    """Runs micro-batches as for any engine; `train_batch` and `eval_batch` return what they do with pipeline stages."""

    def train_batch(self, data: Iterator[Any], engine: StepCalls) -> Tensor:
        """Run all micro-batches of a step. Return the mean of their losses over all ranks."""
        return self._over_ranks(super().train_batch(data, engine))

    def evaluate(self, data: Iterator[Any], engine: StepCalls, *, return_logits: bool) -> Any:
        """Run the forward of a step's micro-batches in `eval()`. Return the mean of their losses over all ranks."""
        count = self._state.resolved.batch.micro_batches
        batches = [next_of_step(data, number, count, call="eval_batch") for number in range(count)]
        modules = [module for module in self._module.modules() if module.training]
        self._module.eval()
        try:
            with torch.no_grad():
                outputs = [call_with(engine, batch) for batch in batches]
        finally:
            for module in modules:
                module.training = True
        loss = self._over_ranks(torch.stack([loss_of(output).float() for output in outputs]).mean())
        return (loss, _joined(outputs)) if return_logits else loss

    def _over_ranks(self, loss: Tensor) -> Tensor:
        groups = [Ranks.of(name) for name in self._state.loss_groups]
        total = sum_over(loss.detach(), groups)
        for group in groups:
            total = total / group.size
        return total


def _joined(outputs: list[Any]) -> Any:
    """Return the outputs of micro-batches as one: tensors are concatenated, floating-point scalars averaged."""
    leaves, specs = zip(*map(flatten_tree, outputs), strict=True)
    together = zip(*leaves, strict=True)
    joined = [joined_values(same) if isinstance(same[0], Tensor) else same[0] for same in together]
    return unflatten_tree(joined, specs[0])
