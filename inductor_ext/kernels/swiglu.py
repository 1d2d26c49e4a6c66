"""SwiGLU (Shazeer, 2020): a gate through SiLU times the other half, in one pass forward and one backward.

For gate and up `[..., n]`, computed in float32 (float64 if one of them is float64) and rounded once:

    s = sigmoid(gate)
    y = gate * s * up                                   [..., n] in `dtype`

    with g the gradient of y:
    dgate = g * up * s * (1 + gate * (1 - s))
    dup   = g * gate * s

Plain torch rounds `silu(gate)` to the input's dtype before it multiplies. Saved for the backward: gate and up; plain
torch saves `silu(gate)` as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .define_pointwise import block_of_row, define_pointwise, launch_pointwise
from .launch import compute_dtype, tl, triton, why_not_floating


def reference(gate: Tensor, up: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Compute the op in plain torch.

    Args:
        gate: `[..., n]`, a floating dtype.
        up: A tensor of the same shape, a floating dtype.
        dtype: Dtype of the result.

    Returns:
        A contiguous tensor of the same shape, in `dtype`.
    """
    wide = compute_dtype(gate, up)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(dtype).contiguous()


def backward_reference(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up in plain torch."""
    wide = compute_dtype(gate, up)
    g, a, b = grad.to(wide), gate.to(wide), up.to(wide)
    s = torch.sigmoid(a)
    dgate, dup = g * b * (s * (1 + a * (1 - s))), g * (a * s)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, y_stride, columns, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of a row in each program."""
    row, column, inside = block_of_row(columns, blocks, BLOCK)
    a = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = a * tl.sigmoid(a) * b
    tl.store(y_ptr + row * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, grad_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    columns, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of a row in each program."""
    row, column, inside = block_of_row(columns, blocks, BLOCK)
    g = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    dgate, dup = g * b * (s * (1 + a * (1 - s))), g * (a * s)
    tl.store(dgate_ptr + row * dgate_stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * dup_stride + column, dup.to(dup_ptr.dtype.element_ty), mask=inside)


def launch_forward(gate: Tensor, up: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Compute `reference` by the Triton kernel."""
    return launch_pointwise(forward_kernel, (gate, up), (dtype,))[0]


def launch_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Compute `backward_reference` by the Triton kernel."""
    return launch_pointwise(backward_kernel, (grad, gate, up), (gate.dtype, up.dtype))


define_pointwise(
    "swiglu",
    forward=(reference, launch_forward),
    backward=(backward_reference, launch_backward),
)


def supports(gate: Tensor, up: Tensor, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    return why_not_floating(gate=gate, other_half=up)
