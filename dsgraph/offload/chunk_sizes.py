"""Chunks of an optimizer's state that are read and written together, and the share on disk: from sizes only."""

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
    """Neighbouring parameters in one chunk: those from `first` up to, not including, `end`, in `size` bytes."""

    first: int
    end: int
    size: int


def place(sizes: Sequence[int], start: int) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes in a slot, from `start`, and the offset after them."""
    found = []
    for size in sizes:
        found.append(start)
        start = -(-(start + size) // _ALIGNMENT) * _ALIGNMENT
    return found, start


def pack(kept: Sequence[Sequence[int]], chunk_bytes: int) -> list[ChunkSpan]:
    """Return chunks of neighbouring parameters.

    Args:
        kept: The bytes of each tensor of state, by parameter.
        chunk_bytes: Largest size of a chunk; a parameter with larger state is a chunk of its own.
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
    """The bytes of a chunk of Adam's state, in files and buffers.

    Attributes:
        state: Bytes of the state.
        on_disk: True if the state is on disk.
        rows: Bytes of its parameters on disk, and of their gradients there; 0 if they are in memory.
        names: Names of its parameters.
    """

    state: int
    on_disk: bool
    rows: int
    names: tuple[str, ...] = ()

    @property
    def buffer(self) -> int:
        """Bytes of the buffer for its state: 0 if it stays in memory."""
        return self.state if self.on_disk else 0


def state_chunks(trained: Sequence[ParameterSpec], ratio: float, chunk_bytes: int = CHUNK_BYTES) -> list[StateChunk]:
    """Return the chunks of a `DiskOptimizer` with Adam, in order.

    Args:
        trained: The parameters, in the order of the optimizer's groups.
        ratio: The share of the state on disk: 0 for none.
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
    """Return the bytes of buffers for transfers to and from disk in a step, outside torch's allocator.

    A step has two chunks at once: it steps on one while the next is read. During the backward it has one, from the
    moment when the last of its gradients is stored; it is assumed to be written before the next chunk's gradients are
    stored. The last two coincide, because nothing is computed between them.

    Args:
        chunks: The chunks of the optimizer.
        graph_buffers: Buffers of the graphs, see `StepMemory`; rows and gradients have the same pool.
        stores: If parameters on disk are stepped during the backward: their names in the order in which their gradients
            are stored, each with the peak of the graphs' buffers from there to the next. None: they are stepped after
            it.
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
    """Return the largest sum of two neighbours."""
    sizes = [getattr(chunk, what) for chunk in chunks]
    return max(sum(sizes[at : at + 2]) for at in range(len(sizes))) if sizes else 0
