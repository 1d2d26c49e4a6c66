"""Ops that move tensors out of the device's memory and back: activations, parameters, gradients.

    handle = offload(x, tier)           starts to copy x out of the device's memory
    saved = finish_offload(handle, x)   after it, x's memory may be reused
    result = reload(saved, ...)         allocates a tensor like x, and starts to fill it
    x_again = wait_transfer(result)     after it, the values are there

    handle = fetch_parameter(rows)      starts to read a parameter on disk
    param = take_parameter(handle, rows)    a new tensor with its values
    nothing = store_gradient(g, rows, handle)   writes its gradient there, or adds it to what is there

No op writes to an argument or depends on anything but its arguments, so graphs may contain them like collectives.
`finish_offload` takes x only to keep its memory from being reused too early. The result of `wait_transfer` is its
argument, as for `_c10d_functional.wait_tensor`.

A handle is a tensor whose memory owns the stored bytes, see `Transfers`.

torch's `ao::offload` (2.13 has it, 2.11 does not) is not used: its host tensors are the saved values themselves, it has
no other tier and no bound on running transfers, and it does nothing without a GPU.
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
    """Start to store a tensor outside the device's memory.

    Args:
        tensor: A dense tensor, in any order of dimensions.
        tier: "host" or "disk".

    Returns:
        `[1]` of int64 on the CPU, for `finish_offload`.

    Raises:
        TransferError: The disk is full, also for an earlier offload.
    """
    return transfers_of(tensor.device).store(tensor, tier)


@define_op(fake=_fake_handle)
def finish_offload(handle: Tensor, source: Tensor) -> Tensor:
    """Return the handle when `source` is no longer read."""
    return transfers_of(source.device).leave(handle)


def _fake_reload(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@define_op(fake=_fake_reload)
def reload(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Start to fill a new tensor with the stored bytes; it may be read after its `wait_transfer`.

    Args:
        handle: The result of `finish_offload`.
        size: That of the stored tensor.
        stride: That of the stored tensor.
        dtype: That of the stored tensor.
        device: That of the stored tensor.
    """
    result = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if result.numel():
        transfers_of(device).reload(handle, result)
    return result


@define_op(fake=_fake_handle)
def fetch_parameter(rows: Tensor) -> Tensor:
    """Start to read a stored parameter.

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
    """Return the values that `fetch_parameter` has read, in a new tensor of the shape of `rows`.

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
    """Move a gradient to the storage of its parameter. The parameter may be updated from then on.

    Args:
        grad: The gradient, with the shape and dtype of `rows`.
        rows: See `fetch_parameter`.
        fetched: The result of the last `fetch_parameter` of these rows, which keeps the order of the two.

    Returns:
        Zeros of the shape of `grad`, in the memory of one element, for autograd.

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
    """Register with Inductor that a wait's result is its argument, and that the others are calls."""
    ops = torch.ops.dsgraph
    activations = (ops.offload, ops.finish_offload, ops.reload)
    for op in (*activations, ops.fetch_parameter, ops.take_parameter, ops.store_gradient):
        lower_as_call(op.default)
    lower_as_wait(torch.ops.dsgraph.wait_transfer.default)
