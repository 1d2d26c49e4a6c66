"""A placeholder in a parameter's `.grad` while its gradient is accumulated elsewhere; it detects `zero_grad`.

In one process an abandoned step ends with `zero_grad`. Nothing calls us then: an optimizer and a module both go
through `.grad` of each parameter, and leave alone what is None. So a `DTensor` without memory of its own stands there.
Its values are NaN, because no number could be right before the ranks' gradients are summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph import compat


class GradState(Enum):
    """The change of `.grad` since a placeholder was put there."""

    UNTOUCHED = "untouched"
    REPLACED = "replaced"
    """`.grad` is None, as after `zero_grad()`, or another tensor."""
    ZEROS = "zeros"
    """`.grad` was filled with zeros, as by `zero_grad(set_to_none=False)`."""
    WRITTEN = "written"
    """`.grad` was written to in another way."""


@dataclass(frozen=True, eq=False)
class StandIn:
    """A placeholder in the `.grad` of one parameter.

    Attributes:
        grad: The placeholder.
        value: [], the memory that all of its elements share.
        covered: The value of `.grad` before.
        versions: Version counters of `grad` and `value` before any write.
    """

    grad: DTensor
    value: Tensor
    covered: Tensor | None
    versions: tuple[int, int]

    @staticmethod
    def put(param: DTensor) -> StandIn:
        """Put a placeholder into a parameter's `.grad`."""
        local = param.to_local().detach()
        value = torch.full((), math.nan, dtype=local.dtype, device=local.device)
        grad = compat.distributed_like(param.detach(), value.expand(local.shape))  # type: ignore[arg-type]
        grad.__deepcopy__ = lambda memo: None  # type: ignore[method-assign]  # a copy of the model is not within a step
        stand_in = StandIn(grad, value, param.grad, (compat.version_of(grad), compat.version_of(value)))
        param.grad = grad
        return stand_in

    def look(self, param: DTensor) -> GradState:
        """Return how `.grad` has changed."""
        if param.grad is not self.grad:
            return GradState.REPLACED
        if (compat.version_of(self.grad), compat.version_of(self.value)) == self.versions:
            return GradState.UNTOUCHED
        # A rank without rows cannot see a write; the other ranks do.
        is_zero = not self.grad.to_local().numel() or self.value.item() == 0
        return GradState.ZEROS if is_zero else GradState.WRITTEN

    def renew(self, param: DTensor) -> StandIn:
        """Replace a placeholder that was filled with zeros by a new one."""
        param.grad = self.covered
        if self.covered is not None:
            self.covered.zero_()
        return StandIn.put(param)

    def take_away(self, param: DTensor) -> None:
        """Restore the earlier `.grad`, unless something else has replaced the placeholder."""
        if param.grad is self.grad:
            param.grad = self.covered
