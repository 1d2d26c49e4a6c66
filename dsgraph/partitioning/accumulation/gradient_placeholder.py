"""A placeholder in a parameter's `.grad` while its gradient is accumulated elsewhere; it detects `zero_grad`.

A script abandons a step by calling `zero_grad`, which has no hook: optimizers and modules only visit each `.grad` that
is not None. Therefore `.grad` holds a placeholder, a `DTensor` without memory of its own. Its values are NaN, because
no number is right before the gradients are summed over ranks. It refuses all writes except those of `zero_grad`,
because clipping or scaling it would have no effect on the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.compat.autograd import version_of
from dsgraph.compat.dtensor import distributed_like
from dsgraph.compat.tensors import flatten_tree, unflatten_tree
from dsgraph.passes.compat import schema_of
from dsgraph.utils.errors import AccumulationError

_ZEROING = ("aten.zero_.default", "aten._foreach_zero_.default")


class GradState(Enum):
    """The change of `.grad` since a placeholder was put there."""

    UNTOUCHED = "untouched"
    REPLACED = "replaced"
    """`.grad` is None, as after `zero_grad()`, or another tensor."""
    ZEROS = "zeros"
    """`.grad` was filled with zeros, as by `zero_grad(set_to_none=False)`."""


class _Unreduced(Tensor):
    """The local part of a placeholder, which refuses to be written to.

    Attributes:
        plain: The same values as a plain tensor; all elements share their memory.
        parameter: Name of the parameter.
    """

    plain: Tensor
    parameter: str

    @staticmethod
    def of(plain: Tensor, name: str) -> _Unreduced:
        """Return a tensor with these values that belongs to the parameter `name`."""
        made = plain.as_subclass(_Unreduced)
        made.plain, made.parameter = plain, name
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the values.

        Raises:
            AccumulationError: The op would write values other than zeros.
        """
        values, spec = flatten_tree((args, kwargs or {}))
        if schema_of(func).is_mutable and str(func) not in _ZEROING:
            (name, *_) = [value.parameter for value in values if isinstance(value, _Unreduced)]
            raise AccumulationError(
                f"the gradient of parameter {name!r} would be written to inside a step of micro-batches, before it is "
                "reduced: clip or scale gradients after the last micro-batch's backward, or drop them with zero_grad()"
            )
        plain = [value.plain if isinstance(value, _Unreduced) else value for value in values]
        plain_args, plain_kwargs = unflatten_tree(plain, spec)
        return func(*plain_args, **plain_kwargs)


@dataclass(frozen=True, eq=False)
class GradientPlaceholder:
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
    def put(param: DTensor, name: str) -> GradientPlaceholder:
        """Put a placeholder into the `.grad` of the parameter `name`."""
        local = param.to_local().detach()
        value = torch.full((), math.nan, dtype=local.dtype, device=local.device)
        shared = _Unreduced.of(value.expand(local.shape), name)
        grad = distributed_like(param.detach(), shared)  # type: ignore[arg-type]
        grad.__deepcopy__ = lambda memo: None  # type: ignore[method-assign]  # a copy of the model is not within a step
        placeholder = GradientPlaceholder(grad, value, param.grad, (version_of(grad), version_of(value)))
        param.grad = grad
        return placeholder

    def look(self, param: DTensor) -> GradState:
        """Return how `.grad` has changed."""
        if param.grad is not self.grad:
            return GradState.REPLACED
        if (version_of(self.grad), version_of(self.value)) == self.versions:
            return GradState.UNTOUCHED
        return GradState.ZEROS

    def renew(self, param: DTensor, name: str) -> GradientPlaceholder:
        """Replace a placeholder that was filled with zeros by a new one."""
        param.grad = self.covered
        if self.covered is not None:
            self.covered.zero_()
        return GradientPlaceholder.put(param, name)

    def take_away(self, param: DTensor) -> None:
        """Restore the earlier `.grad`, unless something else has replaced the placeholder."""
        if param.grad is self.grad:
            param.grad = self.covered
