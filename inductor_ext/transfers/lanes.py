"""How bytes get from a device to the host and back: at once on the CPU, on a stream of its own with CUDA."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from .buffer_pool import Buffer


class Mark(ABC):
    """A moment at which a copy is done."""

    @abstractmethod
    def join(self) -> None:
        """Lets what the device computes from now on come behind the copy."""

    @abstractmethod
    def block(self) -> None:
        """Returns when the copy is done."""


class Lane(ABC):
    """Copies between a device and the host, one behind the other.

    Attributes:
        has_stream: Whether copies run beside what the device computes.
    """

    has_stream: bool

    @abstractmethod
    def to_host(self, source: Tensor, buffer: Buffer) -> Mark:
        """Copies `[n]` bytes into a buffer, behind what the device computes so far."""

    @abstractmethod
    def to_device(self, buffer: Buffer, result: Tensor) -> Mark:
        """Copies the buffer's first bytes into `result`, `[n]` bytes, behind what the device computes so far."""


class _Done(Mark):
    @override
    def join(self) -> None:
        pass

    @override
    def block(self) -> None:
        pass


class CpuLane(Lane):
    """Copies at once."""

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
    """The lane of a device."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()
