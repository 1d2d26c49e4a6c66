"""What stands in a parameter's `.grad` while its gradient is added up elsewhere, so that `zero_grad` is noticed.

In one process a step that is given up ends with `zero_grad`. Nothing calls us then: an optimizer and a module both go
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
    """What has happened to `.grad` since a stand-in was put there."""

    UNTOUCHED = "untouched"
    REPLACED = "replaced"
    """It is None, as after `zero_grad()`, or another tensor."""
    ZEROS = "zeros"
    """It was filled with zeros, as by `zero_grad(set_to_none=False)`."""
    WRITTEN = "written"
    """It was written to in another way."""


@dataclass(frozen=True, eq=False)
class StandIn:
    """What stands in the `.grad` of one parameter.

    Attributes:
        grad: The stand-in.
        value: [], the memory that all of its elements share.
        covered: What stood there before.
        versions: Of `grad` and `value`, when nobody had written to them.
    """

    grad: DTensor
    value: Tensor
    covered: Tensor | None
    versions: tuple[int, int]

    @staticmethod
    def put(param: DTensor) -> StandIn:
        """Puts one there."""
        local = param.to_local().detach()
        value = torch.full((), math.nan, dtype=local.dtype, device=local.device)
        grad = compat.distributed_like(param.detach(), value.expand(local.shape))  # type: ignore[arg-type]
        grad.__deepcopy__ = lambda memo: None  # type: ignore[method-assign]  # a copy of the model has no part in a step
        stand_in = StandIn(grad, value, param.grad, (compat.version_of(grad), compat.version_of(value)))
        param.grad = grad
        return stand_in

    def look(self, param: DTensor) -> GradState:
        """Tells what has happened to it."""
        if param.grad is not self.grad:
            return GradState.REPLACED
        if (compat.version_of(self.grad), compat.version_of(self.value)) == self.versions:
            return GradState.UNTOUCHED
        # Without rows of its own a rank cannot see what was written: the others do.
        is_zero = not self.grad.to_local().numel() or self.value.item() == 0
        return GradState.ZEROS if is_zero else GradState.WRITTEN

    def renew(self, param: DTensor) -> StandIn:
        """Puts a new one in its place, when it was filled with zeros."""
        param.grad = self.covered
        if self.covered is not None:
            self.covered.zero_()
        return StandIn.put(param)

    def take_away(self, param: DTensor) -> None:
        """Puts back what stood there before, unless something else has taken the stand-in's place."""
        if param.grad is self.grad:
            param.grad = self.covered
