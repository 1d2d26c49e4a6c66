"""Cases for the pattern of a kernel: `CASES` of a kernel's test file, run by `test_every_kernel.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsgraph.passes.kernels.spec import KernelSpec

Function = Callable[..., Any]


@dataclass(frozen=True)
class Cases:
    """The cases of a pattern.

    Attributes:
        spec: The kernel.
        inputs: Returns the arguments of all functions, in a dtype.
        spellings: Functions in which the kernel is found once.
        gone: Texts that the code of their graphs no longer contains.
        tolerance: Relative and absolute, in float32.
        exact: Names of the spellings whose value is the same bit for bit in low precision.
        near_misses: Functions with the reason that is reported.
        others: Functions that have nothing to do with the kernel.
    """

    spec: KernelSpec
    inputs: Callable[[torch.dtype], tuple[Tensor, ...]]
    spellings: Mapping[str, Function] = field(default_factory=dict)
    gone: Sequence[str] = ()
    tolerance: tuple[float, float] = (1e-6, 1e-6)
    exact: Collection[str] = ()
    near_misses: Sequence[tuple[Function, str]] = ()
    others: Sequence[Function] = ()


def by_name(*functions: Function) -> dict[str, Function]:
    return {function.__name__: function for function in functions}


def randn(*shapes: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> tuple[Tensor, ...]:
    """Random tensors, always the same, that need gradients."""
    torch.manual_seed(0)
    return tuple(torch.randn(shape).add(mean).to(dtype).requires_grad_() for shape in shapes)
