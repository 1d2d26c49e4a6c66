"""Which state of an optimizer is read and written together, and how much of it lies on disk: by sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsgraph.inductor_ext.transfers.buffers import rounded

from .slots import first_of

CHUNK_BYTES = 32 * 2**20
"""Bytes of state that are read, used and written together. Two chunks are in memory at once."""

_ALIGNMENT = 64  # bytes between tensors of a slot, as vector instructions like it
_STATES = 2  # tensors of a parameter's size: Adam's


@dataclass(frozen=True)
class Span:
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


def pack(kept: Sequence[Sequence[int]], chunk_bytes: int) -> list[Span]:
    """Chunks of neighbouring parameters.

    Args:
        kept: The bytes of each tensor of state, by parameter.
        chunk_bytes: Of a chunk, at most; a parameter whose state takes more is one of its own.
    """
    found: list[Span] = []
    first = start = 0
    for number, sizes in enumerate(kept):
        _, end = place(sizes, start)
        if number > first and end > chunk_bytes:
            found.append(Span(first, number, start))
            first, (_, end) = number, place(sizes, 0)
        start = end
    return [*found, Span(first, len(kept), start)] if kept else found


@dataclass(frozen=True)
class TrainedRows:
    """Rows of a parameter that an optimizer steps on: their bytes, and whether they lie on disk."""

    size: int
    on_disk: bool


@dataclass(frozen=True)
class StateChunk:
    """Bytes of a chunk of Adam's, as files and buffers have them.

    Attributes:
        state: Of the state.
        on_disk: Whether the state lies there.
        rows: Of its parameters that lie on disk, and of their gradients there; 0 where they are in memory.
    """

    state: int
    on_disk: bool
    rows: int

    @property
    def buffer(self) -> int:
        """Bytes through which its state passes: none where it stays in memory."""
        return self.state if self.on_disk else 0


def state_chunks(trained: Sequence[TrainedRows], ratio: float, chunk_bytes: int = CHUNK_BYTES) -> list[StateChunk]:
    """The chunks of `OptimizerOnDisk` around Adam, in order.

    Args:
        trained: In the order of the optimizer's groups.
        ratio: The share of the state that is to lie on disk: 0 for none.
        chunk_bytes: See `CHUNK_BYTES`.
    """
    found: list[tuple[int, int]] = []
    for on_disk in (True, False):
        own = [item.size for item in trained if item.on_disk is on_disk]
        for span in pack([[size] * _STATES for size in own], chunk_bytes):
            rows = sum(2 * rounded(size) for size in own[span.first : span.end]) if on_disk else 0
            found.append((rounded(span.size), rows))
    count = first_of([state for state, _ in found], ratio)
    return [StateChunk(state, number < count, rows) for number, (state, rows) in enumerate(found)]


def step_buffers(chunks: Sequence[StateChunk], graph_buffers: int, *, beside_backward: bool = False) -> int:
    """Bytes of buffers through which what lies on disk passes in a step, past torch's allocator.

    A step has two chunks at once: it steps on one while the next is read. Beside the backward it has one, which is
    taken to be written before the next one's gradients arrive; what is left of the chunks comes behind.

    Args:
        chunks: Of the optimizer.
        graph_buffers: Those of the graphs, see `StepMemory`; rows and gradients have the same pool.
        beside_backward: Whether parameters on disk are stepped on amid the backward.
    """
    amid = [chunk for chunk in chunks if chunk.rows] if beside_backward else []
    behind = chunks[len(amid) :]  # those on disk come first
    state = max(_most(amid, 1, "buffer"), _most(behind, 2, "buffer"))
    return state + max(_most(amid, 1, "rows") + graph_buffers, _most(behind, 2, "rows"))


def _most(chunks: Sequence[StateChunk], together: int, what: str) -> int:
    """The most that so many neighbours take."""
    sizes = [getattr(chunk, what) for chunk in chunks]
    return max((sum(sizes[at : at + together]) for at in range(len(sizes))), default=0)
