"""GEGLU (Shazeer, 2020): a gate through GELU times the other half, in one pass forward and one backward.

For gate and up `[..., n]`, computed in float32 (float64 if one of them is float64) and rounded once:

    p = (1 + erf(gate / sqrt(2))) / 2                                       approximate="none"
    p = (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3))) / 2           approximate="tanh"
    y = gate * p * up                                   [..., n] in `dtype`

    with g the gradient of y and p' the derivative of p:
    dgate = g * up * (p + gate * p')
    dup   = g * gate * p

Plain torch rounds `gelu(gate)` to the input's dtype before it multiplies. Saved for the backward: gate and up; plain
torch saves `gelu(gate)` as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .define_pointwise import block_of_row, define_pointwise, launch_pointwise
from .gelu import gelu_density, gelu_probability
from .launch import compute_dtype, tl, triton, why_not_floating


def reference(gate: Tensor, up: Tensor, *, approximate: str, dtype: torch.dtype) -> Tensor:
    """Compute the op in plain torch.

    Args:
        gate: `[..., n]`, a floating dtype.
        up: A tensor of the same shape, a floating dtype.
        approximate: "none" or "tanh".
        dtype: Dtype of the result.

    Returns:
        A contiguous tensor of the same shape, in `dtype`.
    """
    wide = compute_dtype(gate, up)
    return (torch.nn.functional.gelu(gate.to(wide), approximate=approximate) * up.to(wide)).to(dtype).contiguous()


def backward_reference(grad: Tensor, gate: Tensor, up: Tensor, *, approximate: str) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up in plain torch."""
    wide = compute_dtype(gate, up)
    g, a, b = grad.to(wide), gate.to(wide), up.to(wide)
    dgate = torch.ops.aten.gelu_backward(g * b, a, approximate=approximate)
    dup = g * torch.nn.functional.gelu(a, approximate=approximate)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, y_ptr, gate_stride, up_stride, y_stride, columns, blocks,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of a row in each program."""
    row, column, inside = block_of_row(columns, blocks, BLOCK)
    a = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = a * gelu_probability(a, TANH) * b
    tl.store(y_ptr + row * y_stride + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, grad_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    columns, blocks, TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of a row in each program."""
    row, column, inside = block_of_row(columns, blocks, BLOCK)
    g = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    p = gelu_probability(a, TANH)
    dgate, dup = g * b * (p + a * gelu_density(a, TANH)), g * (a * p)
    tl.store(dgate_ptr + row * dgate_stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * dup_stride + column, dup.to(dup_ptr.dtype.element_ty), mask=inside)


def launch_forward(gate: Tensor, up: Tensor, *, approximate: str, dtype: torch.dtype) -> Tensor:
    """Compute `reference` by the Triton kernel."""
    return launch_pointwise(forward_kernel, (gate, up), (dtype,), TANH=approximate == "tanh")[0]


def launch_backward(grad: Tensor, gate: Tensor, up: Tensor, *, approximate: str) -> tuple[Tensor, ...]:
    """Compute `backward_reference` by the Triton kernel."""
    return launch_pointwise(backward_kernel, (grad, gate, up), (gate.dtype, up.dtype), TANH=approximate == "tanh")


define_pointwise(
    "geglu",
    forward=(reference, launch_forward),
    backward=(backward_reference, launch_backward),
    options=["approximate"],
)


def supports(gate: Tensor, up: Tensor, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    return why_not_floating(gate=gate, other_half=up)
