"""One tensor's bytes outside the device's memory: in host memory, or in a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

from torch import Tensor
from typing_extensions import override

from .buffer_pool import Buffer, BufferPool
from .errors import TransferError
from .files import read_file, write_file
from .lanes import Lane, Mark


class Reload(ABC):
    """A transfer back to the device that was asked for."""

    @abstractmethod
    def finish(self, result: Tensor) -> None:
        """Lets what the device computes from now on find the bytes in `result`, `[n]` of uint8."""

    @abstractmethod
    def give_up(self) -> None:
        """Ends the transfer because nobody has the result any more."""


class Stored(ABC):
    """Bytes outside the device's memory. They go with the last reference to them."""

    @abstractmethod
    def leave(self) -> None:
        """Lets what the device computes from now on write over the source."""

    @abstractmethod
    def start(self, result: Tensor) -> Reload:
        """Starts the transfer back into `result`, `[n]` of uint8. It may be started again, for another result."""


class StoredParameter(ABC):
    """A parameter whose rows lie outside memory, and have room for their gradient there."""

    @abstractmethod
    def start(self) -> Reload:
        """Starts to read the rows."""

    @abstractmethod
    def add_gradient(self, grad: Tensor) -> None:
        """Starts to store a gradient, or adds it to the one that is there; `grad` may be written over afterwards."""


class StoredOnHost(Stored):
    """Bytes in a buffer of a pool."""

    def __init__(self, source: Tensor, *, pool: BufferPool, lane: Lane) -> None:
        """Starts to store `source`, `[n]` of uint8.

        Args:
            source: The bytes.
            pool: For their buffer.
            lane: Of the source's device.
        """
        self._pool, self._lane = pool, lane
        self._buffer = pool.take(source.numel())
        self._copied = lane.to_host(source, self._buffer)

    def __del__(self) -> None:
        if hasattr(self, "_buffer"):
            self._pool.give_back(self._buffer)

    @override
    def leave(self) -> None:
        self._copied.join()

    @override
    def start(self, result: Tensor) -> Reload:
        mark = None
        if self._lane.has_stream:
            self._copied.join()
            mark = self._lane.to_device(self._buffer, result)
        return _ReloadFromHost(self, self._buffer, lane=self._lane, mark=mark)


class _ReloadFromHost(Reload):
    """Without a stream, the copy is made when it is waited for: whoever reads earlier finds no number by chance."""

    def __init__(self, stored: StoredOnHost, buffer: Buffer, *, lane: Lane, mark: Mark | None) -> None:
        self._stored, self._buffer, self._lane, self._mark = stored, buffer, lane, mark

    @override
    def finish(self, result: Tensor) -> None:
        mark = self._mark or self._lane.to_device(self._buffer, result)
        mark.join()

    @override
    def give_up(self) -> None:
        if self._mark is not None:
            self._mark.join()  # the result's memory may be used again from now on


class StoredOnDisk(Stored):
    """Bytes in a file of its own.

    Attributes:
        written: Done when the file is there, or when nobody wants it and the copy out of the device is through.
    """

    def __init__(
        self, source: Tensor, path: Path, *, staging: BufferPool, lane: Lane, threads: ThreadPoolExecutor
    ) -> None:
        """Starts to store `source`, `[n]` of uint8, in a file that is not there yet.

        Args:
            source: The bytes. They are copied to a buffer first, so that the device's memory is free early.
            path: The file.
            staging: For that buffer.
            lane: Of the source's device.
            threads: Which write and read.
        """
        self._path, self._staging, self._lane, self._threads = path, staging, lane, threads
        self._size = source.numel()
        buffer = staging.take(self._size)
        self._copied = lane.to_host(source, buffer)
        self._given_up = Event()
        self.written = threads.submit(_write, path, buffer, copied=self._copied, given_up=self._given_up)
        self.written.add_done_callback(lambda _: staging.give_back(buffer))

    def __del__(self) -> None:
        if hasattr(self, "written"):
            # Not cancelled: the buffer would be used again while the device still copies into it.
            self._given_up.set()
            self.written.add_done_callback(partial(_remove, self._path))

    @override
    def leave(self) -> None:
        self._copied.join()

    @override
    def start(self, result: Tensor) -> Reload:
        return _ReloadFromDisk(self, self._staging.take(self._size))

    def read(self, buffer: Buffer) -> Future[None]:
        """Starts to read the file into a buffer."""
        return self._threads.submit(_read, self._path, buffer, self.written)

    def copy_back(self, buffer: Buffer, result: Tensor) -> None:
        """Copies what was read to the device, and gives the buffer back when that is done."""
        mark = self._lane.to_device(buffer, result)
        mark.join()
        if self._lane.has_stream:
            self._threads.submit(mark.block).add_done_callback(lambda _: self._staging.give_back(buffer))
        else:
            self._staging.give_back(buffer)

    def give_back(self, buffer: Buffer) -> None:
        """Lets a buffer be used again whose bytes nobody wants."""
        self._staging.give_back(buffer)


class _ReloadFromDisk(Reload):
    """The file is read at once; the bytes go on to the device when they are waited for."""

    def __init__(self, stored: StoredOnDisk, buffer: Buffer) -> None:
        self._stored, self._buffer = stored, buffer
        self._future = stored.read(buffer)

    @override
    def finish(self, result: Tensor) -> None:
        failure = self._future.exception()
        if failure is not None:  # one of its own: the future's would hold this frame, and so what is stored
            self._stored.give_back(self._buffer)
            raise TransferError(str(failure)) from failure
        self._stored.copy_back(self._buffer, result)

    @override
    def give_up(self) -> None:
        self._future.cancel()
        stored, buffer = self._stored, self._buffer
        self._future.add_done_callback(lambda _: stored.give_back(buffer))


def _write(path: Path, buffer: Buffer, *, copied: Mark, given_up: Event) -> None:
    copied.block()
    if not given_up.is_set():
        write_file(path, buffer)


def _read(path: Path, buffer: Buffer, written: Future[None]) -> None:
    failure = written.exception()  # writing was asked for earlier, so a thread is at it
    if failure is not None:
        raise TransferError(str(failure)) from failure
    read_file(path, buffer)


def _remove(path: Path, _: Future[None]) -> None:
    path.unlink(missing_ok=True)
