"""Stretches of a graph that compute a part of one repeated block, and do nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from dsgraph.passes.ir.blocks import block_of, is_plain, module_of


@dataclass(frozen=True)
class Segment:
    """Nodes that follow each other and compute a part of one block.

    Attributes:
        blocks: The list of modules that the block is in, such as "model.layers".
        nodes: In program order.
    """

    blocks: str
    nodes: tuple[Node, ...]


def find_segments(gm: GraphModule) -> list[Segment]:
    """The longest stretches of plain computation of one block each.

    A stretch ends where the next block begins, and at all that may not be called twice from one text, or whose place
    passes have chosen: collectives and waits, writes, random numbers, unknown ops, and sizes that are not known.

    Args:
        gm: A graph of ATen ops with fake values.
    """
    found, current = list[Segment](), list[Node]()
    block: tuple[str, str] | None = None

    def end() -> None:
        if current and block is not None:
            found.append(Segment(block[0], tuple(current)))
        current.clear()

    for node in gm.graph.nodes:
        if not is_plain(node):
            end()
            continue
        own = module_of(node)
        here = block if own is None else block_of(own)
        if here != block:
            end()
            block = here
        if block is not None:
            current.append(node)
    end()
    return found
