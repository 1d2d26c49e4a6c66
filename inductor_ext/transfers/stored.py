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
    """A requested transfer back to the device."""

    @abstractmethod
    def finish(self, result: Tensor) -> None:
        """Make the bytes in `result`, `[n]` of uint8, available to later computation of the device."""

    @abstractmethod
    def give_up(self) -> None:
        """End the transfer, because its result is no longer needed."""


class Stored(ABC):
    """Bytes outside the device's memory. They are freed with the last reference to them."""

    @abstractmethod
    def leave(self) -> None:
        """Allow later computation of the device to overwrite the source."""

    @abstractmethod
    def start(self, result: Tensor) -> Reload:
        """Start the transfer back into `result`, `[n]` of uint8. It may be started again, for another result."""


class StoredParameter(ABC):
    """A parameter whose rows are stored outside memory, with room for their gradient."""

    @abstractmethod
    def start(self) -> Reload:
        """Start to read the rows."""

    @abstractmethod
    def add_gradient(self, grad: Tensor) -> None:
        """Start to store a gradient, or add it to the stored one; `grad` may be overwritten afterwards."""


class StoredOnHost(Stored):
    """Bytes in a buffer of a pool."""

    def __init__(self, source: Tensor, *, pool: BufferPool, lane: Lane) -> None:
        """Start to store `source`, `[n]` of uint8.

        Args:
            source: The bytes.
            pool: The pool of their buffer.
            lane: The lane of the source's device.
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
    """A reload from host memory.

    Without a stream, it copies at the wait, so that earlier reads never see the values.
    """

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
        written: Done when the file is written, or when it is not needed and the copy out of the device has ended.
    """

    def __init__(
        self, source: Tensor, path: Path, *, staging: BufferPool, lane: Lane, threads: ThreadPoolExecutor
    ) -> None:
        """Start to store `source`, `[n]` of uint8, in a new file.

        Args:
            source: The bytes. They are copied to a buffer first, so that the device's memory is free early.
            path: The file.
            staging: The pool of that buffer.
            lane: The lane of the source's device.
            threads: The threads that write and read.
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
        """Start to read the file into a buffer."""
        return self._threads.submit(_read, self._path, buffer, self.written)

    def copy_back(self, buffer: Buffer, result: Tensor) -> None:
        """Copy the read bytes to the device, and give the buffer back when that has ended."""
        mark = self._lane.to_device(buffer, result)
        mark.join()
        if self._lane.has_stream:
            self._threads.submit(mark.block).add_done_callback(lambda _: self._staging.give_back(buffer))
        else:
            self._staging.give_back(buffer)

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to the pool whose bytes are not needed."""
        self._staging.give_back(buffer)


class _ReloadFromDisk(Reload):
    """A reload from disk: the file is read immediately; the bytes are copied to the device at the wait."""

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
