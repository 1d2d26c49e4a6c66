"""A linear layer of 1 to 16 rows, bound by reading its weight, as in decoding steps.

For x `[..., k]` with m rows and a weight `[n, k]`, which may be int8 with one scale a row of the weight:

    y[m, n] = sum_k x[m, k] * w[n, k] * scale[n] + bias[n]          summed in float32, rounded once

On the CPU it is C++ (`skinny_cpp.py`). Arguments that C++ does not support, such as float16, use torch's product, or
under Inductor one reduction over the weight for each row of x, which fuses with later ops. On a GPU one program reads
some rows of the weight once, for all rows of x.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
from .skinny_cpp import MOST_ROWS

# Rows of the weight that a program reads, and columns at a time.
_BLOCK_N = 16
_BLOCK_K = 128


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Compute the op in plain torch.

    Args:
        x: `[..., k]`, of `MOST_ROWS` rows or fewer, a floating dtype.
        weight: `[n, k]`, of the dtype of x, or int8.
        bias: `[n]`, of the dtype of x; None: no bias.
        scale: float32 `[n]`, for an int8 weight; None: 1.
    """
    if scale is None:
        return functional.linear(x, weight.to(x.dtype), bias)
    y = functional.linear(x.float(), weight.float()) * scale
    return (y if bias is None else y + bias).to(x.dtype)


def traceable(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return what Inductor compiles: C++ if it supports these, else one loop.

    NotImplemented on a GPU, where the op is called.
    """
    if x.is_cuda:
        return NotImplemented
    if skinny_cpp.takes(x, weight, bias, scale):
        return skinny_cpp.skinny_product(x.contiguous(), weight, bias, scale)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (x.to(wide).unsqueeze(-2) * weight.to(wide)).sum(-1)
    y = y if scale is None else y * scale
    return (y if bias is None else y + bias).to(x.dtype)


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, scale_ptr, y_ptr, rows, n, k, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute `BLOCK_N` columns of y in each program, for all rows: a sum for one row, tensor cores for more."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    at = weight_ptr + column[:, None] * weight_stride
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        inside = (column < n)[:, None] & (place < k)[None, :]
        w = tl.load(at + place[None, :], mask=inside, other=0.0)
        x_inside = (row < rows)[:, None] & (place < k)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + place[None, :], mask=x_inside, other=0.0)
        if ROWS == 1:
            total += tl.sum(w.to(tl.float32) * x.to(tl.float32), 1)[None, :]
        else:
            total = tl.dot(x, tl.trans(w.to(x_ptr.dtype.element_ty)), total, input_precision="ieee")
    if HAS_SCALE:
        total *= tl.load(scale_ptr + column, mask=column < n, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    y_inside = (row < rows)[:, None] & (column < n)[None, :]
    tl.store(y_ptr + row[:, None] * n + column[None, :], total.to(y_ptr.dtype.element_ty), mask=y_inside)


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Compute `reference` by the Triton kernel."""
    flat, matrix = as_rows(x), as_rows(weight)
    (rows, k), n = flat.shape, len(matrix)
    y = x.new_empty((*x.shape[:-1], n))
    with on_device_of(x):
        product_kernel[(-(-n // _BLOCK_N),)](
            *(flat, matrix, x if bias is None else bias, x if scale is None else scale, y),
            *(rows, n, k, flat.stride(0), matrix.stride(0)),
            HAS_BIAS=bias is not None,
            HAS_SCALE=scale is not None,
            ROWS=1 if rows == 1 else max(MOST_ROWS, next_power_of_2(rows)),
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K,
        )
    return y


@define_op(like=reference, fake=skinny_cpp.fake)
def skinny_linear(*tensors: Tensor | None) -> Any:
    """Compute `x @ (weight * scale).t() + bias`, with the arguments of `reference`; contiguous.

    It has no derivative.
    """
    x, weight, bias, scale = tensors
    assert x is not None and weight is not None
    if takes_triton(x):
        return launch(x, weight, bias, scale)
    if skinny_cpp.takes(x, weight, bias, scale):
        return skinny_cpp.skinny_product(x.contiguous(), weight, bias, scale)
    return reference(x, weight, bias, scale).contiguous()


def supports(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> str | None:
    """Return why the op does not support these arguments, or None."""
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or not 0 < rows <= MOST_ROWS:
        return f"its input has {rows} rows, where 1 to {MOST_ROWS} are expected"
    if weight.ndim != 2:
        return f"its weight has {weight.ndim} dimensions"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"its bias has shape {list(bias.shape)}, and its weight {list(weight.shape)}"
    others = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, value in others.items():
        if value.dtype != x.dtype and not (name == "weight" and value.dtype == torch.int8):
            return f"its input is {x.dtype} and its {name} {value.dtype}"
    return why_not_floating(input=x)
