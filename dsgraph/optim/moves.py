"""Transfers of a parameter and its gradient to the place of the optimizer step, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

import torch
from torch import Tensor
from typing_extensions import override

from dsgraph.inductor_ext.transfers.buffer_pool import Buffer, BufferPool
from dsgraph.inductor_ext.transfers.lanes import Lane, Mark
from dsgraph.offload.read_rows import ReadRows
from dsgraph.offload.stored_rows import StoredRows
from dsgraph.partitioning.rows import own_part


class Move(ABC):
    """The transfer of one parameter for one step. It starts when it is created."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Return this rank's rows, `[r, *]`."""

    @abstractmethod
    def grad(self) -> Tensor:
        """Return their gradient, `[r, *]`. It is read before the next micro-batch."""

    @abstractmethod
    def put(self, value: Tensor) -> None:
        """Start to set the parameter to `value`, rounded to its dtype. It may be `rows` itself, which is changed."""

    @abstractmethod
    def settle(self) -> None:
        """Return when `value` of `put` may be overwritten."""


class InPlace(Move):
    """No transfer: the optimizer steps where the parameter is."""

    def __init__(self, param: Tensor) -> None:
        self._param = param

    @override
    def rows(self) -> Tensor:
        return own_part(self._param).detach()

    @override
    def grad(self) -> Tensor:
        assert self._param.grad is not None
        return own_part(self._param.grad)

    @override
    def put(self, value: Tensor) -> None:
        rows = self.rows()
        if value.data_ptr() != rows.data_ptr():
            rows.copy_(value)

    @override
    def settle(self) -> None:
        pass


class FromDisk(Move):
    """The transfer of a parameter and its gradient in a file."""

    def __init__(self, stored: StoredRows) -> None:
        self._read = ReadRows(stored)
        self._writing: Future[None] | None = None

    @override
    def rows(self) -> Tensor:
        return self._read.rows()

    @override
    def grad(self) -> Tensor:
        return self._read.grad()

    @override
    def put(self, value: Tensor) -> None:
        rows = self.rows()
        if value.data_ptr() != rows.data_ptr():
            rows.copy_(value)
        self._writing = self._read.write()

    @override
    def settle(self) -> None:
        if self._writing is not None:
            self._writing.result()


class FromDevice(Move):
    """The transfer of a parameter on a device with memory of its own; its gradient is copied immediately."""

    def __init__(self, param: Tensor, *, lane: Lane, pool: BufferPool) -> None:
        """Start to copy the gradient.

        Args:
            param: A parameter with a gradient, not empty.
            lane: The lane of its device.
            pool: The pool of host memory for running transfers.
        """
        assert param.grad is not None
        self._rows = own_part(param).detach()
        self._lane, self._pool = lane, pool
        self._arriving, self._arrived = self._start(own_part(param.grad))
        self._leaving: Mark | None = None
        self._staged: Buffer | None = None

    def _start(self, source: Tensor) -> tuple[Buffer, Mark]:
        source = source.contiguous()
        buffer = self._pool.take(source.nbytes)
        # After it, the device may reuse the memory of `source`.
        mark = self._lane.to_host(_flat(source), buffer)
        mark.join()
        return buffer, mark

    @override
    def rows(self) -> Tensor:
        buffer, mark = self._start(self._rows)
        mark.block()
        copy = _seen_as(buffer, self._rows).clone()
        self._pool.give_back(buffer)
        return copy

    @override
    def grad(self) -> Tensor:
        self._arrived.block()
        return _seen_as(self._arriving, self._rows)

    @override
    def put(self, value: Tensor) -> None:
        if value.dtype == self._rows.dtype:
            buffer = Buffer(_flat(value), value.nbytes)
        else:
            self._staged = buffer = self._pool.take(self._rows.nbytes)
            _seen_as(buffer, self._rows).copy_(value)
        self._leaving = self._lane.to_device(buffer, _flat(self._rows))
        self._leaving.join()

    @override
    def settle(self) -> None:
        if self._leaving is not None:
            self._leaving.block()
        for buffer in (self._arriving, self._staged):
            if buffer is not None:
                self._pool.give_back(buffer)


def _flat(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)


def _seen_as(buffer: Buffer, like: Tensor) -> Tensor:
    """Return the beginning of a buffer as a tensor of the shape and dtype of `like`."""
    return buffer.data[: like.nbytes].view(like.dtype).view(like.shape)
