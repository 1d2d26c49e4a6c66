"""Dropout (Srivastava et al., 2014) of a softmax, as after the scores of an attention, in one pass each way.

For x `[..., n]` and the dropped share p, s = 1 / (1 - p), 0 if p is 1:

    z    = softmax(x, -1)                                                          [..., n]
    kept = random, each element True with probability 1 - p                        [..., n], bool
    y    = z * kept * s                                                            [..., n] in `dtype`

    with g the gradient of y and u = g * kept * s:
    dx   = z * (u - sum(u * z, -1))

torch's own ops round z to `softmax_dtype` and to `dtype` before they drop, and so does the reference; the Triton kernel
computes in float32 and rounds once. Saved for the backward: x and kept. z is recomputed from x, of which a program
holds a full row: for a 16-bit x that saves half of the bytes of plain torch, which saves z in float32.

The reference draws the same numbers as torch's own dropout. The Triton kernel draws others: Philox (Salmon et al.,
2011) with a seed that torch's generator draws on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import never_merge
from dsgraph.inductor_ext.ops import define_op

from .launch import (
    as_rows,
    full_row,
    launch_full_rows,
    next_power_of_2,
    takes_triton,
    tl,
    triton,
    why_not_rows,
    wide_dtype,
)


def reference(x: Tensor, p: float, *, softmax_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch.

    Args:
        x: `[..., n]`, a floating dtype.
        p: The dropped share, from 0 to 1.
        softmax_dtype: Dtype to which the softmax is rounded; torch computes 16-bit ones in float32.
        dtype: Dtype of the result.

    Returns:
        `[..., n]` in `dtype`; which elements are kept, bool, of the same shape. Both are contiguous.
    """
    z = x.softmax(-1, dtype=softmax_dtype).to(dtype).contiguous()
    y, kept = torch.native_dropout(z, p, True)
    return y, kept.to(torch.bool)  # of no elements torch gives a mask in `dtype`


def backward_reference(grad: Tensor, x: Tensor, kept: Tensor, p: float, *, softmax_dtype: torch.dtype) -> Tensor:
    """Compute the gradient of x in plain torch."""
    wide = wide_dtype(softmax_dtype)
    z, u = x.softmax(-1, dtype=wide), grad.to(wide) * kept * _scale(p)
    return (z * (u - (u * z).sum(-1, keepdim=True))).to(x.dtype).contiguous()


def _scale(p: float) -> float:
    return 0.0 if p == 1 else 1 / (1 - p)


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, seed_ptr, y_ptr, kept_ptr, x_stride, columns, p, scale, BLOCK: tl.constexpr, CALLS: tl.constexpr,
):  # fmt: skip
    """Compute one row in each program. Each of its CALLS of the generator gives four numbers, for four neighbours."""
    row, column, inside = full_row(columns, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    z = tl.exp(x - tl.max(x, 0))
    z = z / tl.sum(z, 0)
    first, second, third, fourth = tl.rand4x(tl.load(seed_ptr), row * CALLS + tl.arange(0, CALLS))
    kept = tl.join(tl.join(first >= p, third >= p), tl.join(second >= p, fourth >= p)).reshape(BLOCK)
    y = z * tl.where(kept, scale, 0.0)  # a product, so that NaN stays NaN
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(kept_ptr + row * columns + column, kept, mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, x_ptr, kept_ptr, dx_ptr, grad_stride, x_stride, kept_stride, columns, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row in each program."""
    row, column, inside = full_row(columns, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    u = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    kept = tl.load(kept_ptr + row * kept_stride + column, mask=inside, other=0)
    u *= tl.where(kept != 0, scale, 0.0)
    z = tl.exp(x - tl.max(x, 0))
    z = z / tl.sum(z, 0)
    dx = z * (u - tl.sum(u * z, 0))
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def launch_forward(x: Tensor, p: float, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `reference` by the Triton kernel, with other random numbers. The host does not wait for the device."""
    rows = as_rows(x)
    columns = rows.shape[1]
    block = max(4, next_power_of_2(columns))
    y, kept = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=torch.bool)
    seed = torch.randint(2**63 - 1, (1,), device=x.device)
    arguments = (rows, seed, y, kept, rows.stride(0), columns, p, _scale(p))
    launch_full_rows(forward_kernel, len(rows), *arguments, columns=columns, BLOCK=block, CALLS=block // 4)
    return y, kept


def launch_backward(grad: Tensor, x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Compute `backward_reference` by the Triton kernel."""
    tensors = [as_rows(item) for item in (grad, x, kept)]
    columns = tensors[1].shape[1]
    dx = x.new_empty(x.shape)
    arguments = (*tensors, dx, *(item.stride(0) for item in tensors), columns, _scale(p))
    launch_full_rows(backward_kernel, len(tensors[1]), *arguments, columns=columns)
    return dx


def _fake(x: Tensor, p: float, *, softmax_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    never_merge(torch.ops.dsgraph.softmax_dropout)  # no graph has a call of it before this has run
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=torch.bool)


@define_op(like=reference, fake=_fake, tags=(torch.Tag.nondeterministic_seeded,))
def softmax_dropout(x: Tensor, p: float, **dtypes: torch.dtype) -> Any:
    """Compute the dropout of a softmax over the last dimension, as in training, with the arguments of `reference`.

    Raises:
        ValueError: p is below 0 or above 1.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"softmax_dropout: p is {p}; a share from 0 to 1 is expected")
    if takes_triton(x) and torch.float64 not in dtypes.values():
        return launch_forward(x, p, dtype=dtypes["dtype"])
    return reference(x, p, **dtypes)


@define_op(fake=lambda grad, x, *_, **__: x.new_empty(x.shape))
def softmax_dropout_backward(grad: Tensor, x: Tensor, kept: Tensor, p: float, *, softmax_dtype: torch.dtype) -> Tensor:
    """Compute the gradient of `softmax_dropout`, contiguous, in the dtype of x."""
    if takes_triton(x, grad) and softmax_dtype != torch.float64:
        return launch_backward(grad, x, kept, p)
    return backward_reference(grad, x, kept, p, softmax_dtype=softmax_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, ctx.p = inputs
    ctx.save_for_backward(x, output[1])
    ctx.softmax_dtype = keyword_only_inputs["softmax_dtype"]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or autograd makes zeros for the gradient that `kept` has not


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, None]:
    if grad is None:
        return None, None
    x, kept = ctx.saved_tensors
    dx = torch.ops.dsgraph.softmax_dropout_backward(grad, x, kept, ctx.p, softmax_dtype=ctx.softmax_dtype)
    return dx, None


softmax_dropout.register_autograd(_backward, setup_context=_setup_context)


def supports(x: Tensor, p: float, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    return "its input is a number, not rows of them" if x.ndim == 0 else why_not_rows(x)
