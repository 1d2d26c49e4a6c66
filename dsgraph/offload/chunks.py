"""Which state of an optimizer lies where: chunks of neighbouring parameters, and places in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsgraph.inductor_ext.transfers.buffers import Buffer
from dsgraph.sharding.rows import own_part
from dsgraph.tiers.stored_rows import StoredRows, stored_rows

_ALIGNMENT = 64  # bytes between tensors of a slot, as vector instructions like it


@dataclass(frozen=True)
class Place:
    """Where a tensor of state lies: in the slot of its chunk, `size` bytes from `start`."""

    key: str
    dtype: torch.dtype
    start: int
    size: int

    def view(self, buffer: Buffer, like: Tensor) -> Tensor:
        """The tensor in a buffer of its slot, of the shape of `like`."""
        return buffer.data[self.start : self.start + self.size].view(self.dtype).view(like.shape)


@dataclass(frozen=True)
class Chunk:
    """Parameters that are stepped together: each with its group's number, and the places of its state."""

    params: tuple[Tensor, ...]
    groups: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...]
    size: int

    @cached_property
    def stored(self) -> tuple[StoredRows | None, ...]:
        """Where the parameters lie; None for those in memory."""
        return tuple(stored_rows(own_part(param)) for param in self.params)


def chunks_of(inner: Optimizer, chunk_bytes: int) -> list[Chunk]:
    """Neighbouring parameters, with the places of what the optimizer keeps of each.

    Those that lie on disk come first, in chunks of their own: amid a backward gradients of others do not arrive.
    """
    on_disk, in_memory = _Chunks(chunk_bytes), _Chunks(chunk_bytes)
    for number, group in enumerate(inner.param_groups):
        kept = {dtype: _kept(inner, group, dtype) for dtype in {param.dtype for param in group["params"]}}
        for param in group["params"]:
            found = in_memory if stored_rows(own_part(param)) is None else on_disk
            found.add(param, number, kept[param.dtype])
    return [*on_disk.all(), *in_memory.all()]


class _Chunks:
    """Chunks, and the one that is being filled."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes, self._start = chunk_bytes, 0
        self._full: list[Chunk] = []
        self._held: list[tuple[Tensor, int, tuple[Place, ...]]] = []

    def add(self, param: Tensor, group: int, kept: Mapping[str, torch.dtype]) -> None:
        places, end = _places(kept, own_part(param).numel(), self._start)
        if self._held and end > self._chunk_bytes:
            self._full, self._held = self.all(), []
            places, end = _places(kept, own_part(param).numel(), 0)
        self._held.append((param, group, places))
        self._start = end

    def all(self) -> list[Chunk]:
        return [*self._full, _chunk(self._held, self._start)] if self._held else self._full


def _chunk(held: Sequence[tuple[Tensor, int, tuple[Place, ...]]], size: int) -> Chunk:
    params, groups, places = zip(*held, strict=True)
    return Chunk(params, groups, places, size)


def _places(kept: Mapping[str, torch.dtype], elements: int, start: int) -> tuple[tuple[Place, ...], int]:
    found = []
    for key, dtype in kept.items():
        size = elements * dtype.itemsize
        found.append(Place(key, dtype, start, size))
        start = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
    return tuple(found), start


def _kept(inner: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What an optimizer keeps of a parameter's size, seen by letting it step on a small one of the same group."""
    groups = inner.param_groups
    probe = torch.zeros(2, 3, dtype=dtype)
    probe.grad = torch.zeros_like(probe)
    inner.param_groups = [{**group, "params": [probe]}]
    try:
        with torch.no_grad():
            inner.step()
        state = inner.state[probe]
        return {
            key: value.dtype for key, value in state.items() if isinstance(value, Tensor) and value.shape == probe.shape
        }
    finally:
        inner.param_groups = groups
        inner.state = defaultdict(dict)
