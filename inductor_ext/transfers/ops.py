"""Ops that move tensors out of the device's memory and back: activations, parameters, gradients.

    handle = offload(x, tier)           starts to copy x out of the device's memory
    saved = finish_offload(handle, x)   behind it, x's memory may be used again
    result = reload(saved, ...)         allocates x's like, and starts to fill it
    x_again = wait_transfer(result)     behind it, the numbers are there

    handle = fetch_parameter(rows)      starts to read a parameter that lies on disk
    param = take_parameter(handle, rows)    a new tensor with its numbers
    nothing = store_gradient(g, rows, handle)   writes its gradient there, or adds it to what is there

No op writes to an argument or draws on anything but its arguments, so graphs may hold them as they hold collectives.
`finish_offload` takes x only to keep its memory from being used again too early, whoever runs the graph. The result of
`wait_transfer` is its argument, as of `_c10d_functional.wait_tensor`.

A handle is a tensor whose memory holds what is stored, see `Transfers`.

Why not torch's `ao::offload` (2.13 has it, 2.11 has not): its host tensors are the saved values themselves, it has
neither another tier nor a bound of bytes in flight, and it does nothing without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import lower_as_call, lower_as_wait
from dsgraph.inductor_ext.ops import define_op

from .transfers import transfers_of


def _fake_handle(*_: object) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@define_op(fake=_fake_handle)
def offload(tensor: Tensor, tier: str) -> Tensor:
    """Starts to store a tensor outside the device's memory.

    Args:
        tensor: Dense, in whatever order of dimensions.
        tier: "host" or "disk".

    Returns:
        `[1]` of int64 on the CPU, for `finish_offload`.

    Raises:
        TransferError: The disk is full, of an earlier offload as well.
    """
    return transfers_of(tensor.device).store(tensor, tier)


@define_op(fake=_fake_handle)
def finish_offload(handle: Tensor, source: Tensor) -> Tensor:
    """The handle, when `source` is no longer read."""
    return transfers_of(source.device).leave(handle)


def _fake_reload(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@define_op(fake=_fake_reload)
def reload(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Starts to fill a new tensor with what is stored; to be read behind its `wait_transfer`.

    Args:
        handle: Of `finish_offload`.
        size: As the stored tensor's.
        stride: As the stored tensor's.
        dtype: As the stored tensor's.
        device: The stored tensor's.
    """
    result = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if result.numel():
        transfers_of(device).reload(handle, result)
    return result


@define_op(fake=_fake_handle)
def fetch_parameter(rows: Tensor) -> Tensor:
    """Starts to read a stored parameter.

    Args:
        rows: The parameter's rows as the module holds them: `[r, *]`, in memory that is mapped from a file.

    Returns:
        `[1]` of int64 on the CPU, for `take_parameter`.

    Raises:
        TransferError: The parameter is not stored.
    """
    return transfers_of(rows.device).fetch(rows) if rows.numel() else torch.zeros(1, dtype=torch.int64)


def _fake_rows(handle: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


@define_op(fake=_fake_rows)
def take_parameter(handle: Tensor, rows: Tensor) -> Tensor:
    """What `fetch_parameter` has read, in a new tensor of the shape of `rows`.

    Raises:
        TransferError: It could not be read.
    """
    result = _fake_rows(handle, rows)
    if rows.numel():
        transfers_of(rows.device).take(handle, result)
    return result


def _no_gradient(grad: Tensor, rows: Tensor, fetched: Tensor | None = None) -> Tensor:
    return grad.new_zeros(()).expand(grad.shape)


@define_op(fake=_no_gradient)
def store_gradient(grad: Tensor, rows: Tensor, fetched: Tensor | None = None) -> Tensor:
    """Takes a gradient out of memory, to where the parameter lies. The parameter may be updated from then on.

    Args:
        grad: Of the shape and dtype of `rows`.
        rows: See `fetch_parameter`.
        fetched: The result of the last `fetch_parameter` of these rows, so that nothing runs the two in another order.

    Returns:
        Zeros of the shape of `grad`, in the memory of one element, for autograd to carry on.

    Raises:
        TransferError: The parameter is not stored, or an earlier gradient could not be written.
    """
    if grad.numel():
        transfers_of(rows.device).stored_parameter(rows).add_gradient(grad)
    return _no_gradient(grad, rows)


def _wait_transfer(result: Tensor) -> Tensor:
    if result.numel():
        transfers_of(result.device).wait(result)
    return result


# Not by `torch.library.custom_op`, which takes no result that is an argument.
torch.library.define("dsgraph::wait_transfer", "(Tensor result) -> Tensor", tags=())
torch.library.impl("dsgraph::wait_transfer", ("CPU", "CUDA"), _wait_transfer)
torch.library.register_fake("dsgraph::wait_transfer", lambda result: result)


def register_lowering() -> None:
    """Tells Inductor that a wait's result is its argument, and that the others are calls."""
    ops = torch.ops.dsgraph
    activations = (ops.offload, ops.finish_offload, ops.reload)
    for op in (*activations, ops.fetch_parameter, ops.take_parameter, ops.store_gradient):
        lower_as_call(op.default)
    lower_as_wait(torch.ops.dsgraph.wait_transfer.default)
