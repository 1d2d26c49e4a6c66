"""Rotary position embedding (Su et al., 2021) in one pass forward and one backward.

For x `[..., n]`, n even, and cos, sin that broadcast against x, with n or n/2 columns, let 1 and 2 name the halves of a
row (`interleaved`: its even and its odd columns; tables of n/2 columns serve both). In float32 (float64 if an input is
float64), rounded once:

    y1 = x1 * cos1 - x2 * sin1
    y2 = x2 * cos2 + x1 * sin2                           [..., n] in `dtype`; `inverse` uses -sin for sin

    with g the gradient of y:
    dx1 = g1 * cos1 + g2 * sin2
    dx2 = g2 * cos2 - g1 * sin1

which is the rotation by the negative angle if the halves of the tables are equal, but is correct for all tables. The
tables have no gradient. Saved for the backward: cos and sin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op

from .launch import compute_dtype, next_power_of_2, on_device_of, takes_triton, tl, triton, why_not_floating

# Elements of half a row that a program rotates, in as many rows as that makes.
_TILE = 1024


def reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool, dtype: torch.dtype) -> Tensor:
    """Compute the op in plain torch.

    Args:
        x: `[..., n]`, n even, a floating dtype.
        cos: `[..., n]` or `[..., n/2]`; its other dimensions broadcast against those of x. It needs no gradient.
        sin: A tensor like cos.
        interleaved: True if a pair is two neighbours; otherwise a column of the first half and the same one of the
            second.
        inverse: True to rotate by the negative angle.
        dtype: Dtype of the result.
    """
    (c1, c2), (s1, s2) = (_tables(item, x, interleaved) for item in (cos, sin))
    return _rotated(x, (c1, c2), (-s1, -s2) if inverse else (s1, s2), interleaved).to(dtype)


def backward_reference(
    grad: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool, dtype: torch.dtype
) -> Tensor:
    """Compute the gradient of x, whose dtype is `dtype`, in plain torch."""
    (c1, c2), (s1, s2) = (_tables(item, grad, interleaved) for item in (cos, sin))
    return _rotated(grad, (c1, c2), (s2, s1) if inverse else (-s2, -s1), interleaved).to(dtype)


def traceable(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    """Compute `reference` in the op's memory layout, for a compiler to trace through."""
    return _in_order_of_memory(reference, x, cos, sin, **options)


def backward_traceable(grad: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    """Compute `backward_reference` in the op's memory layout, for a compiler to trace through."""
    return _in_order_of_memory(backward_reference, grad, cos, sin, **options)


def _in_order_of_memory(compute: Callable[..., Tensor], x: Tensor, *tables: Tensor, **options: Any) -> Tensor:
    """Return `compute`, contiguous, with the strides of `torch.empty_like(x)`, without writes.

    If columns are contiguous it computes with the other dimensions in memory order, without a copy.
    """
    strides = torch.empty_like(x).stride()
    order = sorted(range(x.ndim), key=lambda dim: -strides[dim])
    if order[-1] == x.ndim - 1:
        aligned = (item[(None,) * (x.ndim - item.ndim)].permute(order) for item in (x, *tables))
        y = compute(*aligned, **options)
    else:
        y = compute(x, *tables, **options).permute(order).contiguous()
    return y.permute(sorted(range(x.ndim), key=order.__getitem__))


def _rotated(x: Tensor, cos: tuple[Tensor, Tensor], sin: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    x1, x2 = _halves(x.to(torch.promote_types(cos[0].dtype, compute_dtype(x))), interleaved)
    y1, y2 = x1 * cos[0] - x2 * sin[0], x2 * cos[1] + x1 * sin[1]
    return torch.stack((y1, y2), -1).flatten(-2) if interleaved else torch.cat((y1, y2), -1)


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    n = x.shape[-1]
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : n // 2], x[..., n // 2 :])


def _tables(table: Tensor, x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    wide = table.to(compute_dtype(table))
    return _halves(wide, interleaved) if table.shape[-1] == x.shape[-1] else (wide, wide)


@triton.jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    x_ptr, cos_ptr, sin_ptr, y_ptr, rows, size1, size2, half,
    x_stride0, x_stride1, x_stride2, cos_stride0, cos_stride1, cos_stride2, sin_stride0, sin_stride1, sin_stride2,
    y_stride0, y_stride1, y_stride2, sign,
    INTERLEAVED: tl.constexpr, FULL_COS: tl.constexpr, FULL_SIN: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute some rows of `[size0, size1, size2, 2 * half]` in each program. `TRANSPOSED` rotates a gradient back."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < half)[None, :]
    at0, at1, at2 = row // size2 // size1, row // size2 % size1, row % size2
    if INTERLEAVED:
        first, step = column * 2, 1
    else:
        first, step = column, half
    x_at = x_ptr + (at0 * x_stride0 + at1 * x_stride1 + at2 * x_stride2)[:, None] + first[None, :]
    y_at = y_ptr + (at0 * y_stride0 + at1 * y_stride1 + at2 * y_stride2)[:, None] + first[None, :]
    cos_at = cos_ptr + (at0 * cos_stride0 + at1 * cos_stride1 + at2 * cos_stride2)[:, None]
    sin_at = sin_ptr + (at0 * sin_stride0 + at1 * sin_stride1 + at2 * sin_stride2)[:, None]
    x1 = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x_at + step, mask=inside, other=0.0).to(tl.float32)
    if FULL_COS:
        c1 = tl.load(cos_at + first[None, :], mask=inside, other=0.0).to(tl.float32)
        c2 = tl.load(cos_at + first[None, :] + step, mask=inside, other=0.0).to(tl.float32)
    else:
        c1 = tl.load(cos_at + column[None, :], mask=inside, other=0.0).to(tl.float32)
        c2 = c1
    if FULL_SIN:
        s1 = tl.load(sin_at + first[None, :], mask=inside, other=0.0).to(tl.float32)
        s2 = tl.load(sin_at + first[None, :] + step, mask=inside, other=0.0).to(tl.float32)
    else:
        s1 = tl.load(sin_at + column[None, :], mask=inside, other=0.0).to(tl.float32)
        s2 = s1
    if TRANSPOSED:
        y1 = x1 * c1 + x2 * (s2 * sign)
        y2 = x2 * c2 - x1 * (s1 * sign)
    else:
        y1 = x1 * c1 - x2 * (s1 * sign)
        y2 = x2 * c2 + x1 * (s2 * sign)
    tl.store(y_at, y1.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_at + step, y2.to(y_ptr.dtype.element_ty), mask=inside)


def launch_forward(x: Tensor, *tables: Tensor, **options: Any) -> Tensor:
    """Compute `reference` by the Triton kernel."""
    return _launch(x, *tables, transposed=False, **options)


def launch_backward(grad: Tensor, *tables: Tensor, **options: Any) -> Tensor:
    """Compute `backward_reference` by the Triton kernel."""
    return _launch(grad, *tables, transposed=True, **options)


def _launch(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool, dtype: torch.dtype, transposed: bool
) -> Tensor:
    n = x.shape[-1]
    y = torch.empty_like(x, dtype=dtype)
    if x.ndim > 4 or y.stride(-1) != 1:
        y = x.new_empty(x.shape, dtype=dtype)
    tables = (item.expand(*x.shape[:-1], item.shape[-1]) for item in (cos, sin))
    tensors = [*map(_in_four_dims, (x, *tables)), _in_four_dims(y)]
    strides = [stride for item in tensors for stride in item.stride()[:3]]
    block = next_power_of_2(n // 2)
    programs_rows = max(1, _TILE // block)
    rows = math.prod(x.shape[:-1])
    with on_device_of(x):
        rotate_kernel[(-(-rows // programs_rows),)](
            *(*tensors, rows, *tensors[0].shape[1:3], n // 2, *strides, -1.0 if inverse else 1.0),
            INTERLEAVED=interleaved,
            FULL_COS=cos.shape[-1] == n,
            FULL_SIN=sin.shape[-1] == n,
            TRANSPOSED=transposed,
            ROWS=programs_rows,
            BLOCK=block,
        )
    return y


def _in_four_dims(x: Tensor) -> Tensor:
    """Return x as `[a, b, c, n]` with contiguous columns: a view if possible, as for up to four dimensions."""
    four = x.reshape(-1, *x.shape[-3:]) if x.ndim > 4 else x[(None,) * (4 - x.ndim)]
    return four if four.stride(3) == 1 else four.contiguous()


def _laid_out_as(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` with the strides of `torch.empty_like(x)`, the layout of pointwise ops of x."""
    like = torch.empty_like(x, dtype=y.dtype)
    return y if y.stride() == like.stride() else like.copy_(y)


def _fake(x: Tensor, *tables: Tensor, dtype: torch.dtype, **ways: bool) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@define_op(like=reference, fake=_fake)
def rope(x: Tensor, *tables: Tensor, **options: Any) -> Tensor:
    """Rotate pairs of columns, with the arguments of `reference`; laid out like x.

    Raises:
        RuntimeError: cos or sin needs a gradient.
    """
    compute = launch_forward if takes_triton(x, *tables) else reference
    return _laid_out_as(compute(x, *tables, **options), x)


@define_op(like=backward_reference, fake=_fake)
def rope_backward(grad: Tensor, *tables: Tensor, **options: Any) -> Tensor:
    """Compute the gradient of x in `rope`, whose dtype is `dtype`; laid out like grad."""
    compute = launch_backward if takes_triton(grad, *tables) else backward_reference
    return _laid_out_as(compute(grad, *tables, **options), grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    x, cos, sin = inputs
    if cos.requires_grad or sin.requires_grad:
        raise RuntimeError("dsgraph::rope: cos or sin needs a gradient, which it does not compute; detach them")
    ctx.save_for_backward(cos, sin)
    ctx.options = {**keyword_only_inputs, "dtype": x.dtype}


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.dsgraph.rope_backward(grad, *ctx.saved_tensors, **ctx.options), None, None


rope.register_autograd(_backward, setup_context=_setup_context)


def supports(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    for name, value in (("input", x), ("cosine", cos), ("sine", sin)):
        if value.ndim == 0:
            return f"its {name} has no dimension"
    for name, value in (("cosine", cos), ("sine", sin)):
        if value.requires_grad:
            return f"its {name} needs a gradient, which the kernel does not compute"
    return why_not_floating(input=x, cosine=cos, sine=sin)
