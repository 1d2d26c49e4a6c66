"""GELU of a sum with a bias, in one pass forward and one backward.

For x `[..., n]` and bias `[n]`, computed in float32 (float64 if one of them is float64) and rounded once:

    z = x + bias
    y = gelu(z)                                          [..., n] in `dtype`

    with g the gradient of y:
    dx    = g * gelu'(z)
    dbias = sum over rows of g * gelu'(z)

`approximate` is that of `torch.nn.functional.gelu`. Saved for the backward: x and bias; plain torch saves z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .define_pointwise import block_of_row, define_pointwise, launch_pointwise
from .gelu import gelu_density, gelu_probability
from .launch import (
    PROGRAMS,
    as_rows,
    compute_dtype,
    next_power_of_2,
    on_device_of,
    sum_over_rows,
    tl,
    triton,
    why_not_floating,
)


def reference(x: Tensor, bias: Tensor, *, approximate: str, dtype: torch.dtype) -> Tensor:
    """Compute the op in plain torch.

    Args:
        x: `[..., n]`, a floating dtype.
        bias: `[n]`, a floating dtype.
        approximate: "none" or "tanh".
        dtype: Dtype of the result.

    Returns:
        A contiguous tensor of the shape of x, in `dtype`.
    """
    wide = compute_dtype(x, bias)
    return torch.nn.functional.gelu(x.to(wide) + bias.to(wide), approximate=approximate).to(dtype).contiguous()


def backward_reference(grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and of the bias in plain torch."""
    wide = compute_dtype(x, bias)
    dz = torch.ops.aten.gelu_backward(grad.to(wide), x.to(wide) + bias.to(wide), approximate=approximate)
    return dz.to(x.dtype).contiguous(), sum_over_rows(dz).to(bias.dtype)


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, y_ptr, x_stride, bias_stride, y_stride, columns, blocks,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of a row in each program. The bias is one row of stride 0."""
    row, column, inside = block_of_row(columns, blocks, BLOCK)
    z = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(bias_ptr + row * bias_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = z * gelu_probability(z, TANH)
    tl.store(y_ptr + row * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, grad_stride, x_stride, rows, columns,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute rows p, p + programs, ... of a block of columns in program p, and sum its part of the bias's gradient."""
    first = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        g = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) + bias
        dz = g * (gelu_probability(z, TANH) + z * gelu_density(z, TANH))
        dbias += dz
        tl.store(dx_ptr + row * columns + column, dz.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dbias_ptr + first * columns + column, dbias, mask=inside)


def launch_forward(x: Tensor, bias: Tensor, *, approximate: str, dtype: torch.dtype) -> Tensor:
    """Compute `reference` by the Triton kernel."""
    return launch_pointwise(forward_kernel, (x, bias.expand_as(x)), (dtype,), TANH=approximate == "tanh")[0]


def launch_backward(grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str) -> tuple[Tensor, Tensor]:
    """Compute `backward_reference` by the Triton kernel."""
    grad_rows, x_rows = as_rows(grad), as_rows(x)
    rows, columns = x_rows.shape
    programs, block = min(rows, PROGRAMS), min(1024, next_power_of_2(columns))
    dx, parts = x.new_empty(x.shape), x.new_empty((programs, columns), dtype=torch.float32)
    with on_device_of(x):
        backward_kernel[(programs, -(-columns // block))](
            *(grad_rows, x_rows, bias.contiguous(), dx, parts, grad_rows.stride(0), x_rows.stride(0), rows, columns),
            TANH=approximate == "tanh",
            BLOCK=block,
        )
    return dx, parts.sum(0).to(bias.dtype)


define_pointwise(
    "bias_gelu",
    forward=(reference, launch_forward),
    backward=(backward_reference, launch_backward),
    options=["approximate"],
)


def supports(x: Tensor, bias: Tensor, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    return why_not_floating(input=x, bias=bias)
