"""A pool of reusable host memory outside torch's allocator."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 4096  # bytes; a memory page, and the unit of reads and writes with O_DIRECT


def rounded(size: int) -> int:
    """Return a number of bytes, rounded up to whole pages, at least 1."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


@dataclass(frozen=True)
class Buffer:
    """A piece of host memory that begins at a page.

    Attributes:
        data: `[size]` of uint8.
        size: Bytes, whole pages.
    """

    data: Tensor
    size: int

    def view(self) -> memoryview:
        """Return the memory for file functions."""
        return self.data.numpy().data


class BufferPool:
    """A pool of host memory. It never holds more than the most that was in use at once.

    On a machine with CUDA the memory is pinned. On others it is mapped outside torch's allocator, so that counters of
    the allocator's bytes do not include it.

    Buffers may be given back at any time and by any thread, including a garbage collector's finalizer inside `take`:
    `give_back` takes no lock.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._lock = threading.Lock()
        self._returned: deque[Buffer] = deque()
        self._idle: dict[int, list[Buffer]] = {}
        self._used = self._most_used = self._held = 0

    @property
    def used(self) -> int:
        """Bytes of buffers that were taken and not given back."""
        with self._lock:
            self._collect()
            return self._used

    @property
    def held(self) -> int:
        """Bytes of all buffers, including idle ones."""
        with self._lock:
            self._collect()
            return self._held

    def take(self, size: int) -> Buffer:
        """Return a buffer of this size, rounded up to whole pages, with undefined contents."""
        size = rounded(size)
        with self._lock:
            self._collect()
            self._used += size
            self._most_used = max(self._used, self._most_used)
            idle = self._idle.get(size)
            if idle:
                return idle.pop()
            self._drop_idle(beyond=self._most_used - size)
            self._held += size
        return Buffer(self._allocate(size), size)

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        self._returned.append(buffer)

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._used -= buffer.size
            self._idle.setdefault(buffer.size, []).append(buffer)

    def _drop_idle(self, *, beyond: int) -> None:
        for size in sorted(self._idle, reverse=True):
            while self._held > beyond and self._idle[size]:
                self._idle[size].pop()
                self._held -= size

    def _allocate(self, size: int) -> Tensor:
        if self._pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
