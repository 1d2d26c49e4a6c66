"""Code shared by RMSNorm and LayerNorm, of one tensor or of a sum: launches of Triton kernels, and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from .launch import PROGRAMS, as_rows, full_row, launch_full_rows, tl, triton


def launch_norm(
    kernel: Any,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    *numbers: float,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    **constants: Any,
) -> tuple[Tensor, ...]:
    """Run a kernel that normalises x, or with a residual x + residual, and has as many statistics as parameters.

    Args:
        kernel: The kernel: takes x, residual, parameters, y, total, statistics, the row strides of x and of the
            residual, the columns and `numbers`.
        x: `[..., n]`.
        parameters: The weight, and others: each `[n]`, or None.
        numbers: Numbers that the kernel takes.
        dtype: Dtype of y.
        residual: A tensor like x, or None.
        constants: Constants of the kernel, besides HAS_RESIDUAL, HAS_WEIGHT and BLOCK.

    Returns:
        y; with a residual the sum, like x; the statistics, `[..., 1]` in float32. All contiguous.
    """
    rows, residual_rows = as_rows(x), as_rows(x if residual is None else residual)
    columns = rows.shape[1]
    y, total = x.new_empty(x.shape, dtype=dtype), [] if residual is None else [x.new_empty(x.shape)]
    statistics = [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in parameters]
    given = (rows if item is None else item.contiguous() for item in parameters)
    launch_full_rows(
        *(kernel, len(rows), rows, residual_rows, *given, y, *(total or [y]), *statistics),
        *(rows.stride(0), residual_rows.stride(0), columns, *numbers),
        columns=columns,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=parameters[0] is not None,
        **constants,
    )
    return y, *total, *statistics


def launch_norm_backward(
    kernel: Any,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Sequence[Tensor],
    *numbers: float,
    others: Sequence[torch.dtype | None] = (),
    grad_x: Tensor | None = None,
    **constants: Any,
) -> tuple[Tensor, ...]:
    """Run a kernel that computes the gradients of x and of the parameters.

    Args:
        kernel: The kernel: takes the gradients of y and x, x, weight, statistics, the gradients of x and of the
            parameters, the row strides of the first three, rows, columns and `numbers`.
        grad: The gradient of y.
        x: `[..., n]`, which is normalised.
        weight: `[n]`, or None.
        statistics: The results of `launch_norm`.
        numbers: Numbers that the kernel takes.
        others: Dtypes of the parameters after the weight; None for one that does not exist.
        grad_x: The gradient from other uses of x, to be added; or None.
        constants: Constants of the kernel, besides HAS_GRAD_X, HAS_WEIGHT and BLOCK.

    Returns:
        The gradients of x and of the parameters, empty tensors for those that do not exist.
    """
    grad_rows, grad_x_rows, rows = (as_rows(item) for item in (grad, grad if grad_x is None else grad_x, x))
    columns, programs = rows.shape[1], min(len(rows), PROGRAMS)
    dx = x.new_empty(x.shape)
    dtypes = (None if weight is None else weight.dtype, *others)
    parts = [x.new_empty((programs, columns) if dtype is not None else (0,), dtype=torch.float32) for dtype in dtypes]
    launch_full_rows(
        *(kernel, programs, grad_rows, grad_x_rows, rows, rows if weight is None else weight.contiguous()),
        *(*statistics, dx, *parts),
        *(grad_rows.stride(0), grad_x_rows.stride(0), rows.stride(0), len(rows), columns, *numbers),
        columns=columns,
        HAS_GRAD_X=grad_x is not None,
        HAS_WEIGHT=weight is not None,
        **constants,
    )
    gradients = (
        x.new_empty(0) if dtype is None else part.sum(0).to(dtype) for part, dtype in zip(parts, dtypes, strict=True)
    )
    return dx, *gradients


@triton.jit
def load_row(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, total_ptr, x_stride, residual_stride, columns, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the row of a program, its columns, which of them are inside the row, and the elements of x.

    With a residual, the elements are those of the rounded sum, which is stored as well.
    """
    row, column, inside = full_row(columns, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * columns + column, total, mask=inside)
        x = total.to(tl.float32)
    return row, column, inside, x


def differentiate_norm(
    op: CustomOpDef, backward: Callable[..., Any], *, options: Callable[..., dict[str, Any]], terms: int = 1
) -> None:
    """Register the derivative of a norm, which saves what it normalises, its weight and its statistics.

    Args:
        op: The op: takes x, with two terms a residual, the parameters, of which the weight is the first, an epsilon,
            and keyword-only arguments; returns y, with two terms the sum, and the statistics.
        backward: The derivative: takes the gradient of y, with two terms that of the sum or None, the saved tensors and
            `options`; returns the gradients of what is normalised and of the parameters.
        options: Returns keyword arguments of the derivative for the parameters and keyword-only arguments of the op.
        terms: 1 for a norm of x, 2 for one of x + residual.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        parameters = inputs[terms:-1]
        ctx.save_for_backward(*(inputs[:1] if terms == 1 else output[1:2]), parameters[0], *output[terms:])
        ctx.set_materialize_grads(terms == 1)
        ctx.options = options(*parameters, **keyword_only_inputs)
        ctx.given = [item is not None for item in parameters]

    def differentiate(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        of_total = others[: terms - 1]
        if grad is None:
            return *(of_total * terms), *(None for _ in ctx.given), None
        dx, *gradients = backward(grad, *of_total, *ctx.saved_tensors, **ctx.options)
        of_parameters = (item if given else None for item, given in zip(gradients, ctx.given, strict=True))
        return *([dx] * terms), *of_parameters, None

    op.register_autograd(differentiate, setup_context=setup_context)
