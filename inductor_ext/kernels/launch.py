"""Code shared by Triton kernels and their launchers.

Kernel files import `triton` and `tl` from here. If Triton is not available (it has wheels only for Linux), kernels are
plain functions that nobody calls, and the ops use their references.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.symbolic_sizes import same_shape

try:
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = SimpleNamespace(jit=lambda function: function)  # type: ignore[no-redef]
    tl: Any = SimpleNamespace(constexpr=None)  # type: ignore[no-redef]

# A row of a norm must fit into one program's registers.
MOST_COLUMNS = 65536
# Rows are dealt out to this many programs in a backward that adds over them, each with sums of its own.
PROGRAMS = 256


def on_gpu(x: Tensor) -> bool:
    """Return whether a Triton kernel runs on the device of `x`. With TRITON_INTERPRET=1 it also runs on the CPU."""
    if not hasattr(triton, "knobs"):
        return False
    return x.device.type == "cuda" or (x.device.type == "cpu" and bool(triton.knobs.runtime.interpret))


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the GPU of `x` is the current one, to which Triton launches; empty if it is on none."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return the dtype by Triton's name."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length() if number > 1 else 1


def warps_for(columns: int) -> int:
    """Return the warps of a program that holds a full row in registers: about 8 elements a thread."""
    return min(32, max(1, next_power_of_2(columns) // 256))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels compute for this input dtype: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the dtype in which kernels compute: float32, or float64 if an input is float64."""
    is_double = any(item is not None and item.dtype == torch.float64 for item in tensors)
    return torch.float64 if is_double else torch.float32


def takes_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether a Triton kernel, which computes in float32, supports these inputs."""
    return on_gpu(x) and x.numel() > 0 and compute_dtype(x, *others) == torch.float32


def why_not_floating(**tensors: Tensor) -> str | None:
    """Return why a kernel does not support tensors that are not floating-point, by their argument names, or None."""
    for name, value in tensors.items():
        if not value.dtype.is_floating_point:
            return f"its {name.replace('_', ' ')} is {value.dtype}"
    return None


def why_not_rows(x: Tensor) -> str | None:
    """Return why a kernel that holds a full row of `x` does not support it, or None."""
    if x.device.type == "cuda" and isinstance(x.shape[-1], int) and x.shape[-1] > MOST_COLUMNS:
        return f"its rows have {x.shape[-1]:,} elements, more than {MOST_COLUMNS:,}"
    return why_not_floating(input=x)


def why_not_sum(x: Tensor, residual: Tensor) -> str | None:
    """Return why a kernel that first adds a residual to `x` does not support the two, or None."""
    if x.dtype != residual.dtype:
        return f"it is of the sum of {x.dtype} and {residual.dtype}, where one dtype is expected"
    if not same_shape(x, residual):
        return f"it is of the sum of {list(x.shape)} and {list(residual.shape)}, where one shape is expected"
    return why_not_rows(x)


def as_rows(x: Tensor) -> Tensor:
    """Return `[..., n]` as `[rows, n]` with contiguous columns: a view if possible."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def sum_over_rows(x: Tensor) -> Tensor:
    """Return the sum of `[..., n]` over all dimensions but the last: `[n]`; for a single row a copy."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0)


def launch_full_rows(kernel: Any, programs: int, *arguments: Any, columns: int, **constants: Any) -> None:
    """Run a kernel of which each program holds full rows.

    Args:
        kernel: The kernel: takes `arguments`.
        programs: Number of programs.
        arguments: Arguments of the kernel, of which the first is on its device.
        columns: The elements of a row.
        constants: Constants of the kernel; BLOCK, if it is not among them, is the least power of two that fits a row.
    """
    with on_device_of(arguments[0]):
        kernel[(programs,)](
            *arguments, **{"BLOCK": next_power_of_2(columns), **constants}, num_warps=warps_for(columns)
        )


@triton.jit
def full_row(columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row of a program that holds all of it, its columns, and which of them are inside the row."""
    column = tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64), column, column < columns
