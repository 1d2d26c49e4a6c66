"""Pieces of memory, and what a graph has of them: what `memory.simulate` finds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class MemoryKind(Enum):
    """What a piece of memory is for."""

    INPUT = "input"
    """It comes into the graph."""
    COMMUNICATION = "communication"
    """A collective's result, such as a gathered parameter."""
    OUTPUT = "output"
    """It leaves the graph."""
    OTHER = "other"
    """What is computed in between."""


@dataclass(frozen=True)
class Piece:
    """A piece of memory that one node allocates, or that comes in with an input.

    Attributes:
        node: The node or input; `name:i` for the i-th result of a node that gives several.
        bytes: Its size.
        kind: What it is for.
        first: Number of the node at which it comes to life; 0 for an input.
        last: Number of the node that uses it last; the number of nodes for what stays alive.
        owned: Whether the caller holds it, so that it outlives the graph.
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
        live: For each node, bytes alive while it runs: what it reads, what it writes and what later nodes need.
        pieces: All pieces of memory, in the order in which they come to life.
        roots: Node name -> the pieces in which its value lies, by their names. A node without tensors has none.
        outputs: For each of the graph's outputs the node that gives it; None for an output that is a constant.
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
        """Number of the first node at which that is so."""
        return self.live.index(self.peak) if self.live else 0

    @property
    def peak_node(self) -> str:
        """Its name; empty for a graph without nodes."""
        return self.nodes[self.peak_index] if self.nodes else ""

    def bytes_of(self, names: Collection[str]) -> int:
        """Bytes of the named pieces."""
        return sum(self.by_name[name].bytes for name in names)

    def alive_at(self, index: int) -> list[Piece]:
        """What is alive while the node of this number runs, largest first."""
        found = [piece for piece in self.pieces if piece.first <= index <= piece.last]
        return sorted(found, key=lambda piece: -piece.bytes)
