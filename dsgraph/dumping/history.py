"""Which passes made, changed and moved a node: noted on the node, so that it goes along into later graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from .order import out_of_order
from .records import EventRecord

# Copied with all other meta data when a joint graph is split.
_HISTORY = "dsgraph_history"


def history(node: Node) -> tuple[EventRecord, ...]:
    """What passes did to the node, first things first."""
    events: tuple[EventRecord, ...] = node.meta.get(_HISTORY, ())
    return events


@dataclass(frozen=True)
class Snapshot:
    """The nodes of a graph in order, each with what it calls on what; and which are to be recomputed or saved."""

    calls: dict[Node, tuple[Any, ...]]
    tags: dict[Node, Any]

    @staticmethod
    def of(gm: GraphModule) -> Snapshot:
        """Takes down a graph before a pass runs."""
        return Snapshot(
            calls={node: _call(node) for node in gm.graph.nodes},
            tags={node: node.meta["recompute"] for node in gm.graph.nodes if "recompute" in node.meta},
        )


def note_changes(gm: GraphModule, before: Snapshot, *, phase: str, pass_name: str) -> int:
    """Compares the graph with the snapshot and writes down on each node what the pass did to it.

    Returns:
        How many nodes the pass made, changed, moved or removed.
    """
    kept: list[Node] = []
    touched = 0
    for node in gm.graph.nodes:
        if node not in before.calls:
            _note(node, EventRecord(phase, pass_name, "made"))
            touched += 1
            continue
        kept.append(node)
        if before.calls[node] != _call(node):
            _note(node, EventRecord(phase, pass_name, "changed"))
            touched += 1
        if before.tags.get(node) != node.meta.get("recompute"):
            _note(node, EventRecord(phase, pass_name, "tagged"))
            touched += 1
    places = {node: place for place, node in enumerate(before.calls)}
    moved = out_of_order([places[node] for node in kept])
    for index in moved:
        _note(kept[index], EventRecord(phase, pass_name, "moved"))
    return touched + len(moved) + len(before.calls) - len(kept)


def _call(node: Node) -> tuple[Any, ...]:
    return (node.op, node.target, node.args, node.kwargs)


def _note(node: Node, event: EventRecord) -> None:
    node.meta[_HISTORY] = (*history(node), event)
