"""The history of a node: which passes made, changed and moved it.

It is noted on the node, so that later graphs keep it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from .order import out_of_order
from .records import EventRecord

# Copied with all other meta data when a joint graph is split.
_HISTORY = "dsgraph_history"
_ACTIONS = ("made", "changed", "tagged", "moved")


def history(node: Node) -> tuple[EventRecord, ...]:
    """Return what passes did to the node, in order."""
    events: tuple[EventRecord, ...] = node.meta.get(_HISTORY, ())
    return events


@dataclass(frozen=True)
class Snapshot:
    """The nodes of a graph in order, each with its target and arguments, and which are to be recomputed or saved."""

    targets: dict[Node, Any]
    args: dict[Node, Any]
    kwargs: dict[Node, Any]
    tags: dict[Node, Any]

    @staticmethod
    def of(gm: GraphModule) -> Snapshot:
        """Take a snapshot of a graph before a pass runs."""
        nodes = list(gm.graph.nodes)
        return Snapshot(
            targets={node: node.target for node in nodes},
            args={node: node.args for node in nodes},
            kwargs={node: node.kwargs for node in nodes if node.kwargs},
            tags={node: node.meta["recompute"] for node in nodes if "recompute" in node.meta},
        )

    def has_call(self, node: Node) -> bool:
        """Return whether the node still has the target and arguments of the snapshot."""
        then = (self.targets[node], self.args[node], self.kwargs.get(node, {}))
        return then == (node.target, node.args, node.kwargs)


def note_changes(gm: GraphModule, before: Snapshot, *, phase: str, pass_name: str) -> int:
    """Compare the graph with the snapshot and write down on each node what the pass did to it.

    Returns:
        How many nodes the pass made, changed, moved or removed.
    """
    kept: list[Node] = []
    touched = 0
    made, changed, tagged, moved = (EventRecord(phase, pass_name, what) for what in _ACTIONS)
    for node in gm.graph.nodes:
        if node not in before.targets:
            _note(node, made)
            touched += 1
            continue
        kept.append(node)
        if not before.has_call(node):
            _note(node, changed)
            touched += 1
        if before.tags.get(node) != node.meta.get("recompute"):
            _note(node, tagged)
            touched += 1
    places = {node: place for place, node in enumerate(before.targets)}
    strays = out_of_order([places[node] for node in kept])
    for index in strays:
        _note(kept[index], moved)
    return touched + len(strays) + len(before.targets) - len(kept)


def _note(node: Node, event: EventRecord) -> None:
    node.meta[_HISTORY] = (*history(node), event)
