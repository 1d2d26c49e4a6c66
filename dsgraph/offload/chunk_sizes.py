"""Which state of an optimizer is read and written together, and how much of it lies on disk: by sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsgraph.inductor_ext.transfers.buffer_pool import rounded
from dsgraph.passes import ParameterSpec
from dsgraph.passes.analysis.states import OPTIMIZER_STATES, shard_bytes

from .slots import first_of

CHUNK_BYTES = 32 * 2**20
"""Bytes of state that are read, used and written together. Two chunks are in memory at once."""

_ALIGNMENT = 64  # bytes between tensors of a slot, as vector instructions like it


@dataclass(frozen=True)
class ChunkSpan:
    """Neighbours that are one chunk: those from `first` up to, not including, `end`, in `size` bytes."""

    first: int
    end: int
    size: int


def place(sizes: Sequence[int], start: int) -> tuple[list[int], int]:
    """Where tensors of so many bytes begin in a slot, one behind the other from `start`, and where the next may."""
    found = []
    for size in sizes:
        found.append(start)
        start = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
    return found, start


def pack(kept: Sequence[Sequence[int]], chunk_bytes: int) -> list[ChunkSpan]:
    """Chunks of neighbouring parameters.

    Args:
        kept: The bytes of each tensor of state, by parameter.
        chunk_bytes: Of a chunk, at most; a parameter whose state takes more is one of its own.
    """
    found: list[ChunkSpan] = []
    first = start = 0
    for number, sizes in enumerate(kept):
        _, end = place(sizes, start)
        if number > first and end > chunk_bytes:
            found.append(ChunkSpan(first, number, start))
            first, (_, end) = number, place(sizes, 0)
        start = end
    return [*found, ChunkSpan(first, len(kept), start)] if kept else found


@dataclass(frozen=True)
class StateChunk:
    """Bytes of a chunk of Adam's, as files and buffers have them.

    Attributes:
        state: Of the state.
        on_disk: Whether the state lies there.
        rows: Of its parameters that lie on disk, and of their gradients there; 0 where they are in memory.
        names: Of its parameters.
    """

    state: int
    on_disk: bool
    rows: int
    names: tuple[str, ...] = ()

    @property
    def buffer(self) -> int:
        """Bytes through which its state passes: none where it stays in memory."""
        return self.state if self.on_disk else 0


def state_chunks(trained: Sequence[ParameterSpec], ratio: float, chunk_bytes: int = CHUNK_BYTES) -> list[StateChunk]:
    """The chunks of `DiskOptimizer` around Adam, in order.

    Args:
        trained: The parameters, in the order of the optimizer's groups.
        ratio: The share of the state that is to lie on disk: 0 for none.
        chunk_bytes: See `CHUNK_BYTES`.
    """
    found: list[StateChunk] = []
    for on_disk in (True, False):
        own = [item for item in trained if bool(item.tier) is on_disk]
        for span in pack([[shard_bytes(item)] * OPTIMIZER_STATES for item in own], chunk_bytes):
            items = own[span.first : span.end]
            rows = sum(2 * rounded(shard_bytes(item)) for item in items) if on_disk else 0
            found.append(StateChunk(rounded(span.size), False, rows, tuple(item.name for item in items)))
    count = first_of([chunk.state for chunk in found], ratio)
    return [replace(chunk, on_disk=number < count) for number, chunk in enumerate(found)]


def step_buffers(
    chunks: Sequence[StateChunk], graph_buffers: int, *, stores: Sequence[tuple[str, int]] | None = None
) -> int:
    """Bytes of buffers through which what lies on disk passes in a step, past torch's allocator.

    A step has two chunks at once: it steps on one while the next is read. Beside the backward it has one, from the
    moment when the last of its gradients is stored, and this is taken to be written before the next one's gradients
    are. The last two come together, since nothing computes between them.

    Args:
        chunks: Of the optimizer.
        graph_buffers: Those of the graphs, see `StepMemory`; rows and gradients have the same pool.
        stores: Where parameters on disk are stepped on amid the backward: their names in the order in which their
            gradients are stored, each with the most that graphs have from there to the next. None: behind it.
    """
    if stores is None:
        return _most(chunks, "buffer") + max(graph_buffers, _most(chunks, "rows"))
    waiting = {name: chunk for chunk in chunks if chunk.rows for name in chunk.names}
    left = {chunk.names: len(chunk.names) for chunk in chunks if chunk.rows}
    arrived: list[StateChunk] = []
    most = graph_buffers
    for name, used in stores:
        chunk = waiting.pop(name, None)
        if chunk is not None:
            left[chunk.names] -= 1
            if not left[chunk.names]:
                arrived.append(chunk)
        most = max(most, used + (arrived[-1].rows if arrived else 0))
    behind = [*arrived[-2:], *(chunk for chunk in chunks if chunk not in arrived)]
    state = max(_most(behind, "buffer"), *(chunk.buffer for chunk in [*arrived, *behind]), 0)
    return state + max(most, _most(behind, "rows"))


def _most(chunks: Sequence[StateChunk], what: str) -> int:
    """The most that two neighbours take."""
    sizes = [getattr(chunk, what) for chunk in chunks]
    return max(sum(sizes[at : at + 2]) for at in range(len(sizes))) if sizes else 0
