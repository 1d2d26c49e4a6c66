"""LayerNorm (Ba et al., 2016) in one pass forward and one backward.

For x `[..., n]`, computed in s = float32 (float64 for float64) and rounded once:

    mean = mean(x, -1)                                                             [..., 1] in s
    rstd = rsqrt(mean((x - mean)^2, -1) + eps)                                     [..., 1] in s
    y    = (x - mean) * rstd * weight + bias                                       [..., n] in `dtype`

    with g the gradient of y, h = (x - mean) * rstd and u = g * weight, in s:
    dx      = rstd * (u - mean(u, -1) - h * mean(u * h, -1))
    dweight = sum over rows of g * h
    dbias   = sum over rows of g

Saved for the backward: x, weight, mean, rstd.

The Triton functions can first add a residual: `add_layer_norm` uses that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op

from .launch import compute_dtype, full_row, sum_over_rows, takes_triton, tl, triton, why_not_rows
from .launch_norm import differentiate_norm, launch_norm, launch_norm_backward, load_row

_Triple = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, dtype: torch.dtype) -> _Triple:
    """Compute the op in plain torch.

    Args:
        x: `[..., n]`, a floating dtype.
        weight: `[n]`, or None.
        bias: `[n]`, or None.
        eps: Added to the variance.
        dtype: Dtype of the result.

    Returns:
        `[..., n]` in `dtype`, contiguous; the mean and the reciprocal standard deviation, both `[..., 1]` in float32,
        or float64 for float64.
    """
    wide = x.to(compute_dtype(x))
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(dtype).contiguous(), mean.contiguous(), rstd.contiguous()


def backward_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    bias_dtype: torch.dtype | None,
    grad_x: Tensor | None = None,
) -> _Triple:
    """Compute the gradients of x, weight and bias (empty tensors without them) in plain torch.

    `grad_x`, the gradient from other uses of x, is added before rounding.
    """
    g, h = grad.to(rstd.dtype), (x.to(rstd.dtype) - mean) * rstd
    u = g if weight is None else g * weight.to(rstd.dtype)
    dx = rstd * (u - u.mean(-1, keepdim=True) - h * (u * h).mean(-1, keepdim=True))
    dx = dx if grad_x is None else dx + grad_x.to(dx.dtype)
    none = x.new_empty(0)
    dweight = none if weight is None else sum_over_rows(g * h).to(weight.dtype)
    dbias = torch.empty_like(none) if bias_dtype is None else sum_over_rows(g).to(bias_dtype)
    return dx.to(x.dtype).contiguous(), dweight, dbias


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr,
    x_stride, residual_stride, columns, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row in each program.

    With a residual, the norm is that of the rounded sum, which is stored as well.
    """
    row, column, inside, x = load_row(
        x_ptr, residual_ptr, total_ptr, x_stride, residual_stride, columns, HAS_RESIDUAL, BLOCK
    )
    mean = tl.sum(x, 0) / columns
    centred = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    y = centred * rstd
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, grad_x_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    grad_stride, grad_x_stride, x_stride, rows, columns,
    HAS_GRAD_X: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute rows p, p + programs, ... in program p, and sum its part of the gradients of weight and bias."""
    first, column, inside = full_row(columns, BLOCK)
    dweight = tl.zeros([BLOCK], tl.float32)
    dbias = tl.zeros([BLOCK], tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        h = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        if HAS_BIAS:
            dbias += u
        if HAS_WEIGHT:
            dweight += u * h
            u *= weight
        dx = tl.zeros([BLOCK], tl.float32)
        if HAS_GRAD_X:  # after the sums, registers would spill on sm_80
            dx += tl.load(grad_x_ptr + row * grad_x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dx += rstd * (u - tl.sum(u, 0) / columns - h * (tl.sum(u * h, 0) / columns))
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(dweight_ptr + first * columns + column, dweight, mask=inside)
    if HAS_BIAS:
        tl.store(dbias_ptr + first * columns + column, dbias, mask=inside)


def launch_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, **options: Any
) -> tuple[Tensor, ...]:
    """Compute `reference` by the Triton kernel, or that of `add_layer_norm` if a `residual` is given."""
    return launch_norm(forward_kernel, x, (weight, bias), eps, HAS_BIAS=bias is not None, **options)


def launch_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor, bias_dtype: torch.dtype | None, **sums: Any
) -> _Triple:
    """Compute `backward_reference` by the Triton kernel."""
    dx, dweight, dbias = launch_norm_backward(
        *(backward_kernel, grad, x, weight, statistics), others=[bias_dtype], HAS_BIAS=bias_dtype is not None, **sums
    )
    return dx, dweight, dbias


def fake(x: Tensor, *parameters: Any, dtype: torch.dtype) -> _Triple:
    """Return empty results of the op."""
    mean, rstd = (x.new_empty((*x.shape[:-1], 1), dtype=compute_dtype(x)) for _ in range(2))
    return x.new_empty(x.shape, dtype=dtype), mean, rstd


def backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor | None, *statistics: Tensor, bias_dtype: torch.dtype | None
) -> _Triple:
    """Return empty results of the op's derivative."""
    dweight = x.new_empty(0) if weight is None else weight.new_empty(weight.shape)
    dbias = x.new_empty(0) if bias_dtype is None else x.new_empty(x.shape[-1:], dtype=bias_dtype)
    return x.new_empty(x.shape), dweight, dbias


@define_op(like=reference, fake=fake)
def layer_norm(x: Tensor, *parameters: Any, **options: Any) -> tuple[Tensor, ...]:
    """Compute LayerNorm over the last dimension, with the arguments of `reference`."""
    compute = launch_forward if takes_triton(x) else reference
    return compute(x, *parameters, **options)


@define_op(fake=backward_fake)
def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *, bias_dtype: torch.dtype | None
) -> _Triple:
    """Compute the gradients of `layer_norm`: x, weight, bias `[n]`; empty tensors without weight or bias."""
    compute = launch_backward if takes_triton(x) else backward_reference
    return compute(grad, x, weight, mean, rstd, bias_dtype=bias_dtype)


def backward_options(weight: Tensor | None, bias: Tensor | None, **_: Any) -> dict[str, Any]:
    """Return the options of the op's derivative."""
    return {"bias_dtype": None if bias is None else bias.dtype}


differentiate_norm(layer_norm, layer_norm_backward, options=backward_options)


def supports(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    return why_not_rows(x)
