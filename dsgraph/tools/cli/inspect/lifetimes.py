"""Live memory of a graph, and its origin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dsgraph.tools.dumping.records import GraphRecord, NodeRecord, PieceRecord


def pieces_of(graph: GraphRecord, node: NodeRecord) -> list[PieceRecord]:
    """Return the pieces of memory that a node's results lie in."""
    holder = node.shares or node.name
    return [piece for piece in graph.memory if allocator(piece) == holder]


def alive_at(graph: GraphRecord, place: int) -> list[PieceRecord]:
    """Return the pieces of memory that are alive while node number `place` runs, largest first."""
    return sorted(
        (piece for piece in graph.memory if piece.first <= place <= piece.last), key=lambda piece: -piece.bytes
    )


def by_origin(graph: GraphRecord, pieces: Iterable[PieceRecord]) -> list[tuple[str, int, int]]:
    """Return pieces by where in the user's model they are from: (place, bytes, number of pieces), largest first."""
    nodes = {node.name: node for node in graph.nodes}
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for piece in pieces:
        entry = sums[_origin(nodes[allocator(piece)])]
        entry[0] += piece.bytes
        entry[1] += 1
    return sorted(((place, size, count) for place, (size, count) in sums.items()), key=lambda row: -row[1])


def allocator(piece: PieceRecord) -> str:
    """Return the node that allocates a piece."""
    return piece.node.partition(":")[0]


def _origin(node: NodeRecord) -> str:
    if node.op == "placeholder":
        saved = f"saved: {node.source}  {node.code}" if node.source else "inputs"
        return "parameters" if node.parameter else saved
    return f"{node.source}  {node.code}" if node.source else "passes and autograd"
