"""A linear layer of 1 to 16 rows with a 4-bit weight, with a scale and a minimum for each group of neighbours.

For x `[..., k]` with m rows, and bytes, scales and minima of a weight `[n, k]` as `quant/weights.py` lays them out:

    w[n, j, i] = q[n, j, i] * scale[n, j] + least[n, j]                     j a group, i a number of it
    y[m, n]    = sum_j scale[n, j] * sum_i x[m, j, i] * q[n, j, i] + least[n, j] * sum_i x[m, j, i]

On the CPU it is C++ (`skinny_cpp.py`), or a loop of Inductor's for arguments that C++ does not support, such as
float16. On a GPU one program reads some rows of the weight once, for all rows of x; tensor cores multiply by q, which
every dtype represents without rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import decompose
from dsgraph.inductor_ext.kernels.launch import (
    as_rows,
    next_power_of_2,
    on_device_of,
    takes_triton,
    tl,
    triton,
    why_not_floating,
)
from dsgraph.inductor_ext.ops import define_op

from . import skinny_cpp
from .skinny_linear import MOST_ROWS

# Rows of the weight that a program reads.
_BLOCK_N = 16


def reference(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Compute the op in plain torch: the formula, which under Inductor is one loop over the bytes.

    Args:
        x: `[..., k]`, of `MOST_ROWS` rows or fewer, a floating dtype.
        packed: uint8 `[n, groups, k / groups / 2]`.
        scale: float32 `[n, groups]`.
        least: float32 `[n, groups]`.

    Returns:
        `[..., n]`, of the dtype of x.
    """
    n, groups, half = packed.shape
    parts = x.float().reshape(-1, 1, groups, 2, half)
    low, high = (packed & 15).float(), (packed >> 4).float()
    # Over groups first: so a loop adds whole vectors, and a vector's numbers are added up once a row, not once a group.
    products = (low * parts[..., 0, :] + high * parts[..., 1, :]) * scale[..., None]
    of_groups = parts.sum((-1, -2)).squeeze(1)
    return (products.sum(-2).sum(-1) + of_groups @ least.t()).to(x.dtype).view(*x.shape[:-1], n)


def traceable(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Return what Inductor compiles: C++ if it supports these, else the formula.

    NotImplemented on a GPU, where the op is called.
    """
    if x.is_cuda:
        return NotImplemented
    if skinny_cpp.takes_groups(x, packed, scale, least):
        return skinny_cpp.skinny_product_groups(x.contiguous(), packed, scale, least, None)
    return reference(x, packed, scale, least)


@triton.jit
def groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr, packed_ptr, scale_ptr, least_ptr, y_ptr, rows, n, groups, half, x_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute `BLOCK_N` columns of y in each program, for all rows: a sum for one row, tensor cores for more."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, place = tl.arange(0, ROWS), tl.arange(0, HALF)
    inside = (column < n)[:, None] & (place < half)[None, :]
    x_inside = (row < rows)[:, None] & (place < half)[None, :]
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for group in range(0, groups):
        at = column * groups + group
        numbers = tl.load(packed_ptr + at[:, None] * half + place[None, :], mask=inside, other=0)
        scale = tl.load(scale_ptr + at, mask=column < n, other=0.0)
        least = tl.load(least_ptr + at, mask=column < n, other=0.0)
        x_at = x_ptr + row[:, None] * x_stride + 2 * half * group + place[None, :]
        low = tl.load(x_at, mask=x_inside, other=0.0)
        high = tl.load(x_at + half, mask=x_inside, other=0.0)
        q_low, q_high = numbers & 15, numbers >> 4
        if ROWS == 1:
            products = q_low.to(tl.float32) * low.to(tl.float32) + q_high.to(tl.float32) * high.to(tl.float32)
            part = tl.sum(products, 1)[None, :]
        else:
            dtype: tl.constexpr = x_ptr.dtype.element_ty
            part = tl.dot(low, tl.trans(q_low.to(dtype)), input_precision="ieee")
            part = tl.dot(high, tl.trans(q_high.to(dtype)), part, input_precision="ieee")
        of_group = tl.sum(low.to(tl.float32) + high.to(tl.float32), 1)
        total += part * scale[None, :] + of_group[:, None] * least[None, :]
    y_inside = (row < rows)[:, None] & (column < n)[None, :]
    tl.store(y_ptr + row[:, None] * n + column[None, :], total.to(y_ptr.dtype.element_ty), mask=y_inside)


def launch(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Compute `reference` by the Triton kernel."""
    flat, (n, groups, half) = as_rows(x), packed.shape
    y = x.new_empty((*x.shape[:-1], n))
    rows = len(flat)
    with on_device_of(x):
        groups_kernel[(-(-n // _BLOCK_N),)](
            *(flat, packed.contiguous(), scale.contiguous(), least.contiguous(), y),
            *(rows, n, groups, half, flat.stride(0)),
            ROWS=1 if rows == 1 else MOST_ROWS,
            BLOCK_N=_BLOCK_N,
            HALF=max(16, next_power_of_2(half)),
        )
    return y


@define_op(like=reference, fake=skinny_cpp.fake)
def skinny_groups(x: Tensor, *weight: Tensor) -> Any:
    """Compute `x @ w.t()` with the arguments of `reference`; contiguous. It has no derivative."""
    if takes_triton(x):
        return launch(x, *weight)
    if skinny_cpp.takes_groups(x, *weight):
        return skinny_cpp.skinny_product_groups(x.contiguous(), *weight, None)
    return reference(x.contiguous(), *weight).contiguous()


def register_lowering() -> None:
    """Register the op's compiled form with Inductor."""
    decompose(torch.ops.dsgraph.skinny_groups.default, traceable, at_times=True)


def supports(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor) -> str | None:
    """Return why the op does not support these arguments, or None."""
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or not 0 < rows <= MOST_ROWS:
        return f"its input has {rows} rows, where 1 to {MOST_ROWS} are expected"
    if packed.ndim != 3 or x.shape[-1] != 2 * packed.shape[1] * packed.shape[2]:
        return f"its weight has bytes {list(packed.shape)}, and its input {x.shape[-1]} columns"
    if {scale.dtype, least.dtype} != {torch.float32}:
        return f"its scales are {scale.dtype} and its minima {least.dtype}, where float32 is expected"
    return why_not_floating(input=x)
