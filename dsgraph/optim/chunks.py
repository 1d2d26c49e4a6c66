"""Places of an optimizer's state: chunks of neighbouring parameters, and offsets in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from dsgraph.inductor_ext.transfers.buffer_pool import Buffer
from dsgraph.offload.chunk_sizes import pack, place
from dsgraph.offload.stored_rows import StoredRows, stored_rows
from dsgraph.partitioning.rows import own_part


@dataclass(frozen=True)
class StateLocation:
    """The place of a tensor of state: `size` bytes from `start` in the slot of its chunk."""

    key: str
    dtype: torch.dtype
    start: int
    size: int

    def view(self, buffer: Buffer, like: Tensor) -> Tensor:
        """Return the tensor in a buffer of its slot, with the shape of `like`."""
        return buffer.data[self.start : self.start + self.size].view(self.dtype).view(like.shape)


@dataclass(frozen=True)
class Chunk:
    """Parameters that are stepped together: each with its group's number, and the places of its state."""

    params: tuple[Tensor, ...]
    groups: tuple[int, ...]
    places: tuple[tuple[StateLocation, ...], ...]
    size: int

    @cached_property
    def stored(self) -> tuple[StoredRows | None, ...]:
        """The places of the parameters; None for those in memory."""
        return tuple(stored_rows(own_part(param)) for param in self.params)


def chunks_of(inner: Optimizer, chunk_bytes: int) -> list[Chunk]:
    """Return chunks of neighbouring parameters, with the places of their optimizer state.

    Parameters on disk come first, in chunks of their own: gradients of the others do not arrive during a backward.
    """
    on_disk: list[_Held] = []
    in_memory: list[_Held] = []
    for number, group in enumerate(inner.param_groups):
        kept = {dtype: _kept(inner, group, dtype) for dtype in {param.dtype for param in group["params"]}}
        for param in group["params"]:
            found = in_memory if stored_rows(own_part(param)) is None else on_disk
            found.append(_Held(param, number, kept[param.dtype]))
    return [*_packed(on_disk, chunk_bytes), *_packed(in_memory, chunk_bytes)]


@dataclass(frozen=True)
class _Held:
    """A parameter, its group's number, and its state tensors of the same size."""

    param: Tensor
    group: int
    kept: Mapping[str, torch.dtype]

    @property
    def sizes(self) -> list[int]:
        elements = own_part(self.param).numel()
        return [elements * dtype.itemsize for dtype in self.kept.values()]

    def places(self, start: int) -> tuple[tuple[StateLocation, ...], int]:
        """Return their places from `start`, and the start of the next parameter's."""
        starts, end = place(self.sizes, start)
        found = zip(self.kept.items(), starts, self.sizes, strict=True)
        return tuple(StateLocation(key, dtype, at, size) for (key, dtype), at, size in found), end


def _packed(held: Sequence[_Held], chunk_bytes: int) -> list[Chunk]:
    found = []
    for span in pack([item.sizes for item in held], chunk_bytes):
        places, start = [], 0
        own = held[span.first : span.end]
        for item in own:
            each, start = item.places(start)
            places.append(each)
        params, groups = tuple(item.param for item in own), tuple(item.group for item in own)
        found.append(Chunk(params, groups, tuple(places), span.size))
    return found


class _AdagradState(defaultdict[Tensor, dict[str, Any]]):
    """Return the state that Adagrad's constructor makes; called at the first step of a parameter."""

    def __init__(self, start: float) -> None:
        super().__init__(dict)
        self._start = start

    def __missing__(self, param: Tensor) -> dict[str, Any]:
        self[param] = found = {"step": torch.tensor(0.0), "sum": torch.full_like(param, self._start)}
        return found


def new_state(inner: Optimizer) -> defaultdict[Tensor, dict[str, Any]]:
    """Return the state of an optimizer before its first step; each parameter's state is made at its first step."""
    if isinstance(inner, optim.Adagrad):
        return _AdagradState(inner.defaults["initial_accumulator_value"])
    return defaultdict(dict)


def has_stepped(inner: Optimizer) -> bool:
    """Return True if an optimizer has state from a step."""
    if isinstance(inner, optim.Adagrad):  # its constructor makes state
        return any(float(state["step"]) for state in inner.state.values())
    return bool(inner.state)


def _kept(inner: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of the state tensors that have a parameter's size, found by a step on a small one."""
    groups = inner.param_groups
    probe = torch.zeros(2, 3, dtype=dtype)
    probe.grad = torch.zeros_like(probe)
    inner.param_groups, inner.state = [{**group, "params": [probe]}], new_state(inner)
    try:
        with torch.no_grad():
            inner.step()
        state = inner.state[probe]
        return {
            key: value.dtype for key, value in state.items() if isinstance(value, Tensor) and value.shape == probe.shape
        }
    finally:
        inner.param_groups = groups
        inner.state = new_state(inner)
