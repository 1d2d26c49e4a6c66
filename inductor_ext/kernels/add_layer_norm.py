"""LayerNorm of a sum with a residual, and the sum, in one pass forward and one backward.

For x and residual `[..., n]`, of one dtype:

    total         = x + residual, rounded to that dtype                            [..., n]
    y, mean, rstd = layer_norm(total)                                              see `layer_norm`

    with g the gradient of y and t that of total:
    dx = dresidual = (layer_norm's derivative for g) + t, rounded once
    dweight, dbias = layer_norm's

Saved for the backward: total, weight, mean, rstd; neither x nor residual. If y or total has no reader, its gradient is
None, not zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op

from . import layer_norm
from .launch import takes_triton, why_not_sum
from .launch_norm import differentiate_norm

_Triple = tuple[Tensor, Tensor, Tensor]
_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, dtype: torch.dtype
) -> _Four:
    """Compute the op in plain torch.

    Args:
        x: `[..., n]`, a floating dtype.
        residual: A tensor like x.
        weight: `[n]`, or None.
        bias: `[n]`, or None.
        eps: Added to the variance.
        dtype: Dtype of the result.

    Returns:
        `[..., n]` in `dtype`; the sum, like x; the mean and the reciprocal standard deviation, both `[..., 1]` in
        float32, or float64 for float64. All contiguous.
    """
    total = (x + residual).contiguous()
    y, mean, rstd = layer_norm.reference(total, weight, bias, eps, dtype=dtype)
    return y, total, mean, rstd


def backward_reference(
    grad: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    bias_dtype: torch.dtype | None,
) -> _Triple:
    """Compute the gradients of x (which is also that of the residual), weight and bias in plain torch.

    Empty tensors without weight or bias.
    """
    return layer_norm.backward_reference(grad, total, weight, mean, rstd, bias_dtype=bias_dtype, grad_x=grad_total)


def launch_forward(x: Tensor, residual: Tensor, *parameters: Any, **options: Any) -> tuple[Tensor, ...]:
    """Compute `reference` by the Triton kernel of `layer_norm`."""
    return layer_norm.launch_forward(x, *parameters, residual=residual, **options)


def launch_backward(grad: Tensor, grad_total: Tensor | None, *saved: Any, **options: Any) -> _Triple:
    """Compute `backward_reference` by the Triton kernel of `layer_norm`."""
    return layer_norm.launch_backward(grad, *saved, grad_x=grad_total, **options)


def _fake(x: Tensor, residual: Tensor, *parameters: Any, dtype: torch.dtype) -> _Four:
    y, mean, rstd = layer_norm.fake(x, *parameters, dtype=dtype)
    return y, x.new_empty(x.shape), mean, rstd


@define_op(like=reference, fake=_fake)
def add_layer_norm(x: Tensor, *others: Any, **options: Any) -> tuple[Tensor, ...]:
    """Compute the LayerNorm of `x + residual` over the last dimension, with the arguments of `reference`."""
    compute = launch_forward if takes_triton(x) else reference
    return compute(x, *others, **options)


@define_op(
    like=backward_reference,
    fake=lambda grad, grad_total, *saved, **options: layer_norm.backward_fake(grad, *saved, **options),
)
def add_layer_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, *saved: Any, **options: Any
) -> _Triple:
    """Compute the gradients of `add_layer_norm`: for x and residual one tensor like total.

    Others as in `layer_norm`.
    """
    compute = launch_backward if takes_triton(total) else backward_reference
    return compute(grad, grad_total, total, *saved, **options)


differentiate_norm(add_layer_norm, add_layer_norm_backward, options=layer_norm.backward_options, terms=2)


def supports(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, **options: Any
) -> str | None:
    """Return why the op does not support these arguments, or None."""
    return why_not_sum(x, residual)
