"""Tensors that nothing may touch while a collective runs: its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import GraphModule, Node

from dsgraph.passes.ir.coalesced import inputs_of, is_result, results_of
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import is_wait
from dsgraph.passes.ir.op_traits import traits, written_nodes

from .memory import MemoryFacts, Roots

Violation = tuple[str, str]
"""The identity of a broken rule, and the sentence for it."""


def writes_in_flight(gm: GraphModule, memory: MemoryFacts) -> Iterator[Violation]:
    """Yield each op that touches inputs or outputs of a running collective."""
    if not memory.writers:
        return
    reading: dict[Node, list[Node]] = {}
    writing: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        if is_wait(node):
            for buffers in (reading, writing):
                _land(buffers, memory.roots(node))
            continue
        yield from _disturbs(node, reading, writing, memory)
        if is_collective(node):
            written = {root for buffer in written_nodes(node) for root in memory.roots(buffer)}
            for root in written:
                writing.setdefault(root, []).append(node)
            for result in results_of(node):
                for root in {root for source in inputs_of(result) for root in memory.roots(source)} - written:
                    reading.setdefault(root, []).append(result)


def _land(buffers: dict[Node, list[Node]], result: Roots) -> None:
    """Remove the buffers of an ended wait: `result` is one of its results, or its output buffer."""
    for root, nodes in list(buffers.items()):
        nodes[:] = [node for node in nodes if node not in result and root not in result]
        if not nodes:
            del buffers[root]


def _disturbs(
    node: Node, reading: Mapping[Node, list[Node]], writing: Mapping[Node, list[Node]], memory: MemoryFacts
) -> Iterator[Violation]:
    known = traits(node)
    written = {root for target in written_nodes(node) for root in memory.roots(target)} if known.writes else set()
    touched = (
        {root for source in node.all_input_nodes for root in memory.roots(source)} if known.reads or written else set()
    )
    disturbed = [(root, collective) for root in written & reading.keys() for collective in reading[root]]
    disturbed += [(root, collective) for root in touched & writing.keys() for collective in writing[root]]
    for buffer, result in disturbed:
        collective = result.all_input_nodes[0] if is_result(result) else result
        verb = "writes to" if buffer in written else "reads"
        yield (
            f"flight {node.name} {collective.name}",
            f"{node.name} {verb} {buffer.name} while collective {collective.name} is under way with it; nothing may do "
            "so before its wait_tensor: move it after the wait, or copy the tensor first",
        )
