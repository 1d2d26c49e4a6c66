"""Reductions by name: each maps a rank's gradient of a full parameter to its part of the reduced gradient.

`gather_param(..., kept, reduction=name)` calls the entry of `REDUCTIONS` in its derivative. An entry is a function

    own, gradients = reduce(grad, shard_shape, kept, accumulated_grad, dtype=..., reduce_dtype=..., group=...,
                            outer_groups=...)

of the gradient, the shape of this rank's part, the tensors that the reduction keeps from step to step, and the
accumulated gradient or None. It returns this rank's part, and for each tensor of `kept` its value for the next step, or
None; for autograd these values are gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

Reduction: TypeAlias = Callable[..., tuple[Tensor, Sequence[Tensor | None]]]

AVERAGE = "average"
"""The reduction of a marker that names no other: `reduce_grad`. It keeps nothing."""

REDUCTIONS: dict[str, Reduction] = {}


def reduction(name: str) -> Callable[[Reduction], Reduction]:
    """Register the decorated function in `REDUCTIONS`."""

    def register(function: Reduction) -> Reduction:
        REDUCTIONS[name] = function
        return function

    return register


def one_group(group: str, outer_groups: Sequence[str]) -> tuple[str, bool]:
    """Return the one group over which a parameter's gradient is reduced, and whether it splits the parameter's rows."""
    return (group, True) if group else (next(iter(outer_groups), ""), False)
