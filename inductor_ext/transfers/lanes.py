"""Copies between a device and the host: synchronous on the CPU, on separate streams with CUDA."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from .buffer_pool import Buffer


class Mark(ABC):
    """The moment at which a copy has ended."""

    @abstractmethod
    def join(self) -> None:
        """Make later computation of the device wait for the copy."""

    @abstractmethod
    def block(self) -> None:
        """Return when the copy has ended."""


class Lane(ABC):
    """A queue of copies between a device and the host.

    Attributes:
        has_stream: True if copies run beside the device's computation.
    """

    has_stream: bool

    @abstractmethod
    def to_host(self, source: Tensor, buffer: Buffer) -> Mark:
        """Copy `[n]` bytes into a buffer, after the device's computation so far."""

    @abstractmethod
    def to_device(self, buffer: Buffer, result: Tensor) -> Mark:
        """Copy the buffer's first bytes into `result`, `[n]` bytes, after the device's computation so far."""


class _Done(Mark):
    @override
    def join(self) -> None:
        pass

    @override
    def block(self) -> None:
        pass


class CpuLane(Lane):
    """Synchronous copies."""

    has_stream = False

    @override
    def to_host(self, source: Tensor, buffer: Buffer) -> Mark:
        buffer.data[: source.numel()].copy_(source)
        return _Done()

    @override
    def to_device(self, buffer: Buffer, result: Tensor) -> Mark:
        result.copy_(buffer.data[: result.numel()])
        return _Done()


class _Event(Mark):
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    @override
    def join(self) -> None:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(self._event)

    @override
    def block(self) -> None:
        self._event.synchronize()


class CudaLane(Lane):
    """Copies on one stream for each direction, so that both directions of the link are used."""

    has_stream = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @override
    def to_host(self, source: Tensor, buffer: Buffer) -> Mark:
        return self._copy(self._out, buffer.data[: source.numel()], source)

    @override
    def to_device(self, buffer: Buffer, result: Tensor) -> Mark:
        return self._copy(self._in, result, buffer.data[: result.numel()])

    def _copy(self, stream: torch.cuda.Stream, result: Tensor, source: Tensor) -> Mark:
        computing = torch.cuda.current_stream(self._device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            result.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return _Event(event, self._device)


def lane_of(device: torch.device) -> Lane:
    """Return the lane of a device."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()
