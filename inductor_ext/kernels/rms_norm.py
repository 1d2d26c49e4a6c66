"""RMSNorm (Zhang and Sennrich, 2019) in one pass forward and one backward.

For x `[..., n]`, computed in s = float32 (float64 for float64):

    rstd = rsqrt(mean(x^2, -1) + eps)                                              [..., 1] in s
    y    = ((x * rstd).to(norm_dtype) * (offset + weight)).to(dtype)               [..., n]

    with g the gradient of y, h = x * rstd and u = g * (offset + weight), in s:
    dx      = rstd * (u - h * mean(u * h, -1))
    dweight = sum over rows of g * h.to(norm_dtype)

`norm_dtype` differs between models: transformers' Llama rounds to the input's dtype before it multiplies by the weight,
torch's own and Gemma's after it. Sum and product with the weight are rounded as in torch, to the promoted dtype of
norm_dtype and the weight. Saved for the backward: x, weight, rstd.

The Triton functions can first add a residual: `add_rms_norm` uses that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op

from .launch import compute_dtype, full_row, sum_over_rows, takes_triton, tl, triton, triton_dtype, why_not_rows
from .launch_norm import differentiate_norm, launch_norm, launch_norm_backward, load_row


def reference(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: float, norm_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch.

    Args:
        x: `[..., n]`, a floating dtype.
        weight: `[n]`, or None.
        eps: Added to the mean square.
        offset: Added to the weight.
        norm_dtype: Dtype to which the normalised input is rounded before it is multiplied by the weight.
        dtype: Dtype of the result.

    Returns:
        `[..., n]` in `dtype`; the reciprocal root mean square `[..., 1]` in float32, or float64 for float64.
    """
    wide = x.to(compute_dtype(x))
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = (wide * rstd).to(norm_dtype)
    if weight is not None:
        scale = weight.to(_product_dtype(weight, norm_dtype))
        y = y * (scale + offset if offset else scale)
    return y.to(dtype).contiguous(), rstd.contiguous()


def backward_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float,
    norm_dtype: torch.dtype,
    grad_x: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and of the weight (an empty tensor without one) in plain torch.

    `grad_x`, the gradient from other uses of x, is added before rounding.
    """
    wide, g = x.to(rstd.dtype), grad.to(rstd.dtype)
    h = wide * rstd
    u = g if weight is None else g * (weight.to(rstd.dtype) + offset)
    dx = rstd * (u - h * (u * h).mean(-1, keepdim=True))
    dx = (dx if grad_x is None else dx + grad_x.to(dx.dtype)).to(x.dtype).contiguous()
    if weight is None:
        return dx, x.new_empty(0)
    return dx, sum_over_rows(g * h.to(norm_dtype).to(rstd.dtype)).to(weight.dtype)


def _product_dtype(weight: Tensor | None, norm_dtype: torch.dtype) -> torch.dtype:
    return norm_dtype if weight is None else torch.promote_types(norm_dtype, weight.dtype)


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, x_stride, residual_stride, columns, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_TO: tl.constexpr, PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row in each program.

    With a residual, the norm is that of the rounded sum, which is stored as well.
    """
    row, column, inside, x = load_row(
        x_ptr, residual_ptr, total_ptr, x_stride, residual_stride, columns, HAS_RESIDUAL, BLOCK
    )
    rstd = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    y = (x * rstd).to(ROUND_TO).to(tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
        y = (y * scale.to(PRODUCT).to(tl.float32)).to(PRODUCT).to(tl.float32)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, grad_x_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dweight_ptr,
    grad_stride, grad_x_stride, x_stride, rows, columns, offset,
    HAS_GRAD_X: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_TO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute rows p, p + programs, ... in program p, and sum its part of the weight's gradient."""
    first, column, inside = full_row(columns, BLOCK)
    dweight = tl.zeros([BLOCK], tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) + offset
    for row in range(first, rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        h = x * rstd
        if HAS_WEIGHT:
            dweight += u * h.to(ROUND_TO).to(tl.float32)
            u *= scale
        dx = rstd * (u - h * (tl.sum(u * h, 0) / columns))
        if HAS_GRAD_X:
            dx += tl.load(grad_x_ptr + row * grad_x_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if HAS_WEIGHT:
        tl.store(dweight_ptr + first * columns + column, dweight, mask=inside)


def launch_forward(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: float, norm_dtype: torch.dtype, **options: Any
) -> tuple[Tensor, ...]:
    """Compute `reference` by the Triton kernel, or that of `add_rms_norm` if a `residual` is given."""
    dtypes = {"ROUND_TO": triton_dtype(norm_dtype), "PRODUCT": triton_dtype(_product_dtype(weight, norm_dtype))}
    return launch_norm(forward_kernel, x, [weight], eps, offset, **dtypes, **options)


def launch_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, *, offset: float, norm_dtype: torch.dtype, **sums: Any
) -> tuple[Tensor, Tensor]:
    """Compute `backward_reference` by the Triton kernel."""
    round_to = triton_dtype(norm_dtype)
    dx, dweight = launch_norm_backward(backward_kernel, grad, x, weight, [rstd], offset, ROUND_TO=round_to, **sums)
    return dx, dweight


def takes(x: Tensor, weight: Tensor | None, norm_dtype: torch.dtype) -> bool:
    """Return whether the Triton kernels, which compute in float32, support these."""
    return takes_triton(x, weight) and norm_dtype != torch.float64


def fake(x: Tensor, *_: Any, dtype: torch.dtype, **__: Any) -> tuple[Tensor, Tensor]:
    """Return empty results of the op."""
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], 1), dtype=compute_dtype(x))


def backward_fake(grad: Tensor, x: Tensor, weight: Tensor | None, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return empty results of the op's derivative."""
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else torch.empty_like(weight)


@define_op(like=reference, fake=fake)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> tuple[Tensor, ...]:
    """Compute RMSNorm over the last dimension, with the arguments of `reference`."""
    compute = launch_forward if takes(x, weight, options["norm_dtype"]) else reference
    return compute(x, weight, eps, **options)


@define_op(fake=backward_fake)
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, *, offset: float, norm_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `rms_norm`: of x, like x.

    Of the weight, like the weight, or an empty tensor without one.
    """
    compute = launch_backward if takes(x, weight, norm_dtype) else backward_reference
    return compute(grad, x, weight, rstd, offset=offset, norm_dtype=norm_dtype)


def backward_options(weight: Tensor | None, *, offset: float, norm_dtype: torch.dtype, **_: Any) -> dict[str, Any]:
    """Return the options of the op's derivative."""
    return {"offset": offset, "norm_dtype": norm_dtype}


differentiate_norm(rms_norm, rms_norm_backward, options=backward_options)


def supports(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    return why_not_rows(x)
