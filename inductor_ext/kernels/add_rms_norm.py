"""RMSNorm of a sum with a residual, and the sum, in one pass forward and one backward.

For x and residual `[..., n]`, of one dtype:

    total   = x + residual, rounded to that dtype                                  [..., n]
    y, rstd = rms_norm(total)                                                      see `rms_norm`

    with g the gradient of y and t that of total:
    dx = dresidual = (rms_norm's derivative for g) + t, rounded once
    dweight        = rms_norm's

Saved for the backward: total, weight, rstd; neither x nor residual. If y or total has no reader, its gradient is None,
not zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op

from . import rms_norm
from .launch import why_not_sum
from .launch_norm import differentiate_norm

_Triple = tuple[Tensor, Tensor, Tensor]


def reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float,
    norm_dtype: torch.dtype,
    dtype: torch.dtype,
) -> _Triple:
    """Compute the op in plain torch.

    Args:
        x: `[..., n]`, a floating dtype.
        residual: A tensor like x.
        weight: `[n]`, or None.
        eps: Added to the mean square.
        offset: Added to the weight.
        norm_dtype: Dtype to which the normalised sum is rounded before it is multiplied by the weight.
        dtype: Dtype of the result.

    Returns:
        `[..., n]` in `dtype`; the sum, like x; the reciprocal root mean square `[..., 1]` in float32, or float64 for
        float64. All contiguous.
    """
    total = (x + residual).contiguous()
    y, rstd = rms_norm.reference(total, weight, eps, offset=offset, norm_dtype=norm_dtype, dtype=dtype)
    return y, total, rstd


def backward_reference(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    offset: float,
    norm_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x (also that of the residual) and weight (empty without one) in plain torch."""
    return rms_norm.backward_reference(
        grad, total, weight, rstd, offset=offset, norm_dtype=norm_dtype, grad_x=grad_total
    )


def launch_forward(x: Tensor, residual: Tensor, *parameters: Any, **options: Any) -> tuple[Tensor, ...]:
    """Compute `reference` by the Triton kernel of `rms_norm`."""
    return rms_norm.launch_forward(x, *parameters, residual=residual, **options)


def launch_backward(grad: Tensor, grad_total: Tensor | None, *saved: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute `backward_reference` by the Triton kernel of `rms_norm`."""
    return rms_norm.launch_backward(grad, *saved, grad_x=grad_total, **options)


def _fake(x: Tensor, residual: Tensor, *parameters: Any, **options: Any) -> _Triple:
    y, rstd = rms_norm.fake(x, *parameters, **options)
    return y, x.new_empty(x.shape), rstd


@define_op(like=reference, fake=_fake)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **options: Any) -> tuple[Tensor, ...]:
    """Compute the RMSNorm of `x + residual` over the last dimension, with the arguments of `reference`."""
    compute = launch_forward if rms_norm.takes(x, weight, options["norm_dtype"]) else reference
    return compute(x, residual, weight, eps, **options)


@define_op(
    like=backward_reference,
    fake=lambda grad, grad_total, *saved, **options: rms_norm.backward_fake(grad, *saved, **options),
)
def add_rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor | None, rstd: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `add_rms_norm`: for x and residual one tensor like total.

    The weight's as in `rms_norm`.
    """
    compute = launch_backward if rms_norm.takes(total, weight, options["norm_dtype"]) else backward_reference
    return compute(grad, grad_total, total, weight, rstd, **options)


differentiate_norm(add_rms_norm, add_rms_norm_backward, options=rms_norm.backward_options, terms=2)


def supports(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    return why_not_sum(x, residual)
