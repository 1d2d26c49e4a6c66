"""A file of fixed slots for tensors, read and written by threads without the page cache."""

from __future__ import annotations

import mmap
import os
import shutil
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from zlib import crc32

import torch

from dsgraph.inductor_ext.transfers.buffer_pool import ALIGNMENT, Buffer, BufferPool, rounded
from dsgraph.inductor_ext.transfers.errors import TransferError
from dsgraph.inductor_ext.transfers.files import transfer_part
from dsgraph.inductor_ext.transfers.folder import PrivateFolder, folder_below
from dsgraph.utils.errors import OffloadError

CHECKSUMS = "DSGRAPH_OFFLOAD_CHECKSUMS"
"""The environment variable that enables a checksum of everything that is read, if it is neither empty nor "0"."""
_THREADS = 2  # one prefetches while the other writes


def first_of(sizes: Sequence[int], ratio: float) -> int:
    """Return how many of the first pieces have this share of all bytes, rounded up to full pieces."""
    before = [0, *accumulate(sizes)]
    return sum(start < ratio * before[-1] for start in before[:-1])


def share_of(sizes: Sequence[int], count: int) -> float:
    """Return the share of all bytes in the first `count` pieces, for which `first_of` returns `count`."""
    if not 0 < count < len(sizes):
        return float(count > 0)
    return (sum(sizes[:count]) - 0.5) / sum(sizes)  # half a byte less: no rounding makes it one piece more


class SlotFile:
    """A preallocated file in a folder of this process, removed by `close`, with this object, or with the process.

    A killed process leaves its folder on disk; the next process that makes such a file there removes it.

    Attributes:
        path: The file.
        sizes: Bytes of each slot, whole pages.
    """

    def __init__(self, sizes: Sequence[int], *, below: Path, name: str) -> None:
        """Reserve the file's space on disk.

        Args:
            sizes: Bytes of each slot.
            below: A folder on the disk; the private folder is made in it.
            name: Name of the file.

        Raises:
            OffloadError: The folder cannot be used, or the disk has too few bytes free.
        """
        self.sizes = [rounded(size) for size in sizes]
        self._offsets = [0, *accumulate(self.sizes)]
        try:
            self._folder = PrivateFolder(folder_below(below))
        except (OSError, TransferError) as error:
            raise OffloadError(f"{below} cannot hold offloaded tensors: {error}") from error
        self.path = self._folder.path / name
        try:
            with self.path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, self._offsets[-1]))
        except OSError as error:
            free = shutil.disk_usage(below).free
            self._folder.remove()
            raise OffloadError(
                f"{self.path}: {self._offsets[-1]} bytes cannot be reserved, {free} are free ({error.strerror}): free "
                "space there, or name a folder on a larger disk in nvme_path"
            ) from error
        self._sums: dict[int, int] | None = {} if os.environ.get(CHECKSUMS, "0") not in ("", "0") else None
        self._mapped: set[int] = set()  # which others write to as well: without checksums
        self._buffers = BufferPool(pinned=False)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="dsgraph-offload")
        # Does not wait for threads: the garbage collector may call it in one of them, when no work is left.
        self._let_go = weakref.finalize(self, _let_go, self._folder, self._threads)

    def close(self) -> None:
        """Wait for reads and writes, end the threads, and remove the file; a second call does nothing.

        Memory that was mapped from the file stays valid.
        """
        self._threads.shutdown(wait=True)
        self._let_go()

    def _refuse_closed(self) -> None:
        if not self._let_go.alive:
            raise OffloadError(f"{self.path} was closed, by engine.close() for example: what it held is gone")

    def take(self, slot: int) -> Buffer:
        """Return a buffer of a slot's size, with undefined contents."""
        return self._buffers.take(self.sizes[slot])

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        self._buffers.give_back(buffer)

    def read(self, slot: int) -> Future[Buffer]:
        """Start to read a slot into a buffer, which the caller gives back."""
        self._refuse_closed()
        return self._threads.submit(self._read, slot, self.take(slot))

    def write(self, slot: int, buffer: Buffer) -> Future[None]:
        """Start to write a buffer to a slot; then the buffer is given back."""
        self._refuse_closed()
        return self._threads.submit(self._write, slot, buffer)

    def map(self, slot: int) -> mmap.mmap:
        """Return the slot as memory, which the kernel reads and writes as it is used; it ends with the process.

        An error of the disk ends the process there: use `read` and `write` for accesses in every step.
        """
        self._mapped.add(slot)
        return self._map(slot, mmap.ACCESS_WRITE)

    def map_copy(self, slot: int) -> mmap.mmap:
        """Return the slot as memory that shows the file, also later writes to it; writes to this memory go to a copy.

        Raises:
            OffloadError: The file is lost, truncated, or, with checksums enabled, not what was written.
        """
        if self._sums is not None:
            self.give_back(self._read(slot, self.take(slot)))
        try:
            return self._map(slot, mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: it is too short
            raise OffloadError(_lost(self.path, "read", error)) from error

    def _map(self, slot: int, access: int) -> mmap.mmap:
        self._refuse_closed()
        handle = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(handle, self.sizes[slot], access=access, offset=self._offsets[slot])
        finally:
            os.close(handle)

    def read_part(self, slot: int, start: int, size: int) -> tuple[mmap.mmap, int]:
        """Return bytes of a slot, from offset `start`, in memory of their own.

        Returns:
            The memory, and their offset in it.

        Raises:
            OffloadError: The file cannot be read, or, with checksums enabled, it is not what was written.
        """
        if self._sums is not None and slot in self._sums:
            self.give_back(self._read(slot, self.take(slot)))
        begin = start % ALIGNMENT
        memory = anonymous(rounded(begin + size))
        self._fill(_buffer_in(memory), at=self._offsets[slot] + start - begin)
        return memory, begin

    def write_part(self, slot: int, start: int, data: memoryview) -> None:
        """Write bytes to a slot at offset `start`, and leave the rest unchanged.

        Raises:
            OffloadError: The file cannot be read or written.
        """
        begin = start % ALIGNMENT
        at = self._offsets[slot] + start - begin
        buffer = _buffer_in(anonymous(rounded(begin + data.nbytes)))
        if begin or buffer.size != data.nbytes:  # others are in its first page, or in its last one
            self._fill(buffer, at=at)
        buffer.view()[begin : begin + data.nbytes] = data
        try:
            transfer_part(self.path, os.O_WRONLY, buffer, os.pwritev, at=at)
        except OSError as error:
            raise OffloadError(_lost(self.path, "written", error)) from error
        if self._sums is not None and slot not in self._mapped:
            whole = self.take(slot)
            self._fill(whole, at=self._offsets[slot])
            self._sums[slot] = crc32(whole.view())
            self.give_back(whole)

    def _fill(self, buffer: Buffer, *, at: int) -> None:
        self._refuse_closed()
        try:
            transfer_part(self.path, os.O_RDONLY, buffer, os.preadv, at=at)
        except OSError as error:
            raise OffloadError(_lost(self.path, "read", error)) from error

    @property
    def buffer_bytes(self) -> int:
        """Bytes of memory for buffers."""
        return self._buffers.held

    def _read(self, slot: int, buffer: Buffer) -> Buffer:
        try:
            self._fill(buffer, at=self._offsets[slot])
        except OffloadError:
            self.give_back(buffer)
            raise
        if self._sums is not None and slot in self._sums and self._sums[slot] != crc32(buffer.view()):
            self.give_back(buffer)
            raise OffloadError(
                f"{self.path}: slot {slot}, {self.sizes[slot]} bytes from {self._offsets[slot]}, is not what was "
                "written there (its checksum differs): see whether the disk is in order, and load the last checkpoint"
            )
        return buffer

    def _write(self, slot: int, buffer: Buffer) -> None:
        try:
            if self._sums is not None and slot not in self._mapped:
                self._sums[slot] = crc32(buffer.view())
            transfer_part(self.path, os.O_WRONLY, buffer, os.pwritev, at=self._offsets[slot])
        except OSError as error:
            raise OffloadError(_lost(self.path, "written", error)) from error
        finally:
            self.give_back(buffer)


def _let_go(folder: PrivateFolder, threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False)
    folder.remove()


def anonymous(size: int) -> mmap.mmap:
    """Return private memory of this size: its pages can be dropped."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _buffer_in(memory: mmap.mmap) -> Buffer:
    """Return a buffer over memory that belongs to no pool, which would keep it."""
    return Buffer(torch.frombuffer(memory, dtype=torch.uint8), len(memory))


def _lost(path: Path, what: str, error: OSError | ValueError) -> str:
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return (
        f"{path} cannot be {what}: {why}. What was offloaded there is lost: see whether the disk is in order, and load "
        "the last checkpoint"
    )
