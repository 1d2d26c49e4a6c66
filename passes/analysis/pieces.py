"""Pieces of memory, and the memory of a graph as `memory.simulate` finds it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class MemoryKind(Enum):
    """The purpose of a piece of memory."""

    INPUT = "input"
    """An input of the graph."""
    COMMUNICATION = "communication"
    """A collective's result, such as a gathered parameter."""
    OUTPUT = "output"
    """An output of the graph."""
    OTHER = "other"
    """An intermediate result."""


@dataclass(frozen=True)
class Piece:
    """A piece of memory that one node allocates, or that belongs to an input.

    Attributes:
        node: The node or input; `name:i` for the i-th result of a node that gives several.
        bytes: Its size.
        kind: Its purpose.
        first: Number of the node that allocates it; 0 for an input.
        last: Number of the node that uses it last; the number of nodes if it stays alive.
        owned: True if the caller holds it, so that it outlives the graph.
    """

    node: str
    bytes: int
    kind: MemoryKind
    first: int
    last: int
    owned: bool = False


@dataclass(frozen=True)
class GraphMemory:
    """The memory of one graph.

    Attributes:
        nodes: Names of the nodes, in program order.
        live: For each node, bytes alive while it runs: its arguments, its results and values that later nodes need.
        pieces: All pieces of memory, in the order of allocation.
        roots: Node name -> names of the pieces of its value. A node without tensors has none.
        outputs: For each of the graph's outputs its node; None for a constant output.
    """

    nodes: tuple[str, ...]
    live: tuple[int, ...]
    pieces: tuple[Piece, ...]
    roots: Mapping[str, tuple[str, ...]]
    outputs: tuple[str | None, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Piece]:
        """The pieces by their names."""
        return {piece.node: piece for piece in self.pieces}

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return max(self.live, default=0)

    @property
    def peak_index(self) -> int:
        """Number of the first node at the peak."""
        return self.live.index(self.peak) if self.live else 0

    @property
    def peak_node(self) -> str:
        """Name of the first node at the peak; empty for a graph without nodes."""
        return self.nodes[self.peak_index] if self.nodes else ""

    def bytes_of(self, names: Collection[str]) -> int:
        """Return the bytes of the named pieces."""
        return sum(self.by_name[name].bytes for name in names)

    def alive_at(self, index: int) -> list[Piece]:
        """Return the pieces that are alive while the node of this number runs, largest first."""
        found = [piece for piece in self.pieces if piece.first <= index <= piece.last]
        return sorted(found, key=lambda piece: -piece.bytes)
