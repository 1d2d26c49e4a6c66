"""A tensor in a slot of a file, read and written explicitly: none of its pages is mapped for that."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .slots import SlotFile, anonymous


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor: `start` bytes from the beginning of a slot of a file."""

    file: SlotFile
    slot: int
    start: int
    dtype: torch.dtype
    shape: torch.Size

    def read(self) -> Tensor:
        """Return the tensor, `[*shape]`, in memory of its own.

        Raises:
            OffloadError: The file cannot be read.
        """
        return self.read_memory()[0]

    def read_memory(self) -> tuple[Tensor, mmap.mmap]:
        """Return the tensor, and its memory, which is private, so that its pages can be dropped."""
        memory, begin = self.file.read_part(self.slot, self.start, self.shape.numel() * self.dtype.itemsize)
        return _over(memory, begin, self.dtype, self.shape), memory

    def write(self, part: Tensor, offsets: Sequence[int]) -> None:
        """Write a part of the tensor, and leave the rest unchanged.

        Args:
            part: A tensor with the same number of dimensions.
            offsets: Its first index in each dimension.

        Raises:
            OffloadError: The file cannot be read or written.
        """
        if not part.numel():
            return
        if part.shape[1:] != self.shape[1:]:  # not whole rows
            whole = self.read()
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
            part, offsets = whole, [0] * whole.dim()
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        start = self.start + (offsets[0] * row if part.dim() else 0)
        self.file.write_part(self.slot, start, _bytes(part.to(self.dtype).contiguous()))


def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor, `[*shape]`, which is returned to the system as soon as it is unused."""
    # Not from torch's allocator: glibc keeps much of the memory that is freed between tensors of some megabytes.
    return _over(anonymous(max(1, math.prod(shape) * dtype.itemsize)), 0, dtype, shape)


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _over(memory: mmap.mmap, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a tensor whose storage is no larger than its bytes: saving it copies nothing."""
    count = math.prod(shape)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin) if count else torch.empty(0, dtype=dtype)
    return flat.view(tuple(shape))
