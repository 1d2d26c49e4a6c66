"""A transform of one parameter around its gather, besides what its ZeRO stage does."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.inductor_ext import AVERAGE, REDUCTIONS


class ParameterTransform:
    """A change of one parameter around its gather; a transform overrides what it needs.

    `ParameterState.register` adds it to a parameter. The seam, gather markers and initialization call these methods
    instead of knowing each transform:

        rows = store(rows); attach(param)                    when the rows get memory
        before_eager_gather()                                outside compiled graphs
        full = after_gather(gather_param(shard, ..., kept=inputs, reduction=reduction))
        own = reduce(grad, shard, ...)                       outside compiled graphs, if `reduction` is not the average

    Attributes:
        reduction: The entry of `dsgraph.inductor_ext.REDUCTIONS` that reduces the gradient.
        tier: Where the rows are stored: "disk", or "" for memory.
        is_copied: Whether a deep copy of the model keeps the transform.
    """

    reduction: ClassVar[str] = AVERAGE
    tier: ClassVar[str] = ""
    is_copied: ClassVar[bool] = False

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the reduction keeps from step to step: it gives new values as their gradients."""
        return ()

    def working_bytes(self, numbers: int) -> int:
        """Return the bytes that `after_gather` takes besides its result, outside compiled graphs.

        Args:
            numbers: Number of elements of the gathered parameter.
        """
        return 0

    def store(self, rows: Tensor) -> Tensor:
        """Return this rank's rows in the memory where the parameter keeps them."""
        return rows

    def attach(self, param: DTensor) -> None:
        """Note the parameter that holds the rows."""

    def before_eager_gather(self) -> None:
        """Note that the rows are about to be gathered outside compiled graphs."""

    def after_gather(self, full: Tensor) -> Tensor:
        """Return the value that modules use in place of the full parameter; graphs capture it."""
        return full

    def reduce(self, grad: Tensor, shard: Tensor, **options: Any) -> Tensor:
        """Return this rank's part of the reduced gradient; set the new values of `inputs` as their `.grad`.

        Args:
            grad: `[*shape]`, this rank's gradient.
            shard: This rank's part of the parameter.
            options: The options of the reduction: `dtype`, `reduce_dtype`, `group`, `outer_groups`.
        """
        with torch.no_grad():
            own, gradients = REDUCTIONS[self.reduction](grad, shard.shape, self.inputs, None, **options)
        for tensor, gradient in zip(self.inputs, gradients, strict=True):
            if gradient is not None:
                tensor.grad = gradient
        return own
