"""Code shared by element-wise kernels: the definition of their ops, and the launch of their Triton functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from dsgraph.inductor_ext.ops import define_op

from .launch import as_rows, next_power_of_2, on_device_of, takes_triton, tl, triton


def define_pointwise(
    name: str,
    *,
    forward: tuple[Callable[..., Any], Callable[..., Any]],
    backward: tuple[Callable[..., Any], Callable[..., Any]],
    options: Sequence[str] = (),
) -> None:
    """Define the op `dsgraph::<name>` and its derivative `dsgraph::<name>_backward`.

    The op takes tensors, which it saves for the backward, and keyword-only arguments, one of which is `dtype`, that of
    the result. The result has the shape of the first tensor; all results are contiguous.

    Args:
        name: The name of the op.
        forward: Its reference, annotated, and a function that computes the same by a Triton kernel.
        backward: The same two functions for the derivative. They take the gradient of the result, the op's tensors and
            `options`, and return the gradients of the op's tensors, each in its dtype.
        options: The op's keyword-only arguments that its derivative takes as well.
    """
    op = _define(name, *forward, fake=lambda x, *_, dtype, **__: x.new_empty(x.shape, dtype=dtype))
    derivative = _define(f"{name}_backward", *backward, fake=_backward_fake)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.options = {name: keyword_only_inputs[name] for name in options}

    def differentiate(ctx: Any, grad: Tensor) -> Any:
        return derivative(grad, *ctx.saved_tensors, **ctx.options)

    op.register_autograd(differentiate, setup_context=setup_context)


def _define(
    name: str, reference: Callable[..., Any], launch: Callable[..., Any], *, fake: Callable[..., Any]
) -> CustomOpDef:
    def compute(*tensors: Tensor, **options: Any) -> Any:
        return (launch if takes_triton(*tensors) else reference)(*tensors, **options)

    compute.__name__ = name
    return define_op(like=reference, fake=fake)(compute)


def _backward_fake(grad: Tensor, *inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return tuple(item.new_empty(item.shape) for item in inputs)


def launch_pointwise(
    kernel: Any, inputs: Sequence[Tensor], dtypes: Sequence[torch.dtype], **constants: Any
) -> tuple[Tensor, ...]:
    """Run an element-wise kernel.

    Args:
        kernel: The kernel: takes inputs, outputs, the row stride of each of them, the columns and the blocks of a row.
        inputs: Tensors `[..., n]`, all of one shape.
        dtypes: The dtypes of the outputs.
        constants: Constants of the kernel, besides BLOCK.

    Returns:
        The outputs: contiguous tensors of the shape of the inputs.
    """
    outputs = tuple(inputs[0].new_empty(inputs[0].shape, dtype=dtype) for dtype in dtypes)
    tensors = [as_rows(item) for item in (*inputs, *outputs)]
    rows, columns = tensors[0].shape
    block = min(1024, next_power_of_2(columns))
    blocks = -(-columns // block)
    strides = [item.stride(0) for item in tensors]
    with on_device_of(tensors[0]):
        kernel[(rows * blocks,)](*tensors, *strides, columns, blocks, BLOCK=block, **constants)
    return outputs


@triton.jit
def block_of_row(columns, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row of a program of `launch_pointwise`, its columns, and which of them are inside the row."""
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), column, column < columns
