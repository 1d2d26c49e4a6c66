"""When each node of a graph runs, by predicted times: computation in one lane, transfers in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from dsgraph.tools.dumping.records import GraphRecord, NodeRecord


@dataclass(frozen=True)
class Transfer:
    """A collective under way.

    Attributes:
        node: That starts it.
        start: When, seconds from the start of the graph.
        end: When it is through.
        exposed: How long the computation stands still for it. Seconds.
        queued: For how much of that others are under way, and it has not begun. Seconds.
        behind: The nodes that compute meanwhile.
    """

    node: NodeRecord
    start: float
    end: float
    exposed: float
    queued: float
    behind: tuple[NodeRecord, ...]


@dataclass(frozen=True)
class Timeline:
    """What runs when.

    Attributes:
        computed: Nodes that take time, with when each starts and ends. Seconds.
        transfers: The collectives, in program order.
        seconds: Until all is done.
    """

    computed: tuple[tuple[NodeRecord, float, float], ...]
    transfers: tuple[Transfer, ...]
    seconds: float

    @property
    def exposed(self) -> float:
        """How long the computation stands still in all. Seconds."""
        return sum(transfer.exposed for transfer in self.transfers)


def simulate(graph: GraphRecord) -> Timeline:
    """Runs through a graph: nodes one after the other, collectives one after the other beside them."""
    now = free = 0.0  # when the computation, and the link, are ready for the next
    computed: list[tuple[NodeRecord, float, float]] = []
    started: dict[str, tuple[NodeRecord, float, float]] = {}
    started_by: dict[str, str] = {}  # what a wait may read -> the collective
    exposed: dict[str, float] = {}
    queued: dict[str, float] = {}
    for node in graph.nodes:
        if node.collective is not None:
            begin = max(now, free)
            free = begin + (node.collective.seconds or 0.0)
            started[node.name] = (node, begin, free)
            started_by[node.name] = node.name
        elif node.target == "operator.getitem" and node.inputs[0] in started_by:
            started_by[node.name] = started_by[node.inputs[0]]  # one result of a coalesced collective
        elif _is_wait(node) and node.inputs and node.inputs[0] in started_by:
            name = started_by[node.inputs[0]]
            _, begin, end = started[name]
            exposed[name] = exposed.get(name, 0.0) + max(0.0, end - now)
            queued[name] = queued.get(name, 0.0) + max(0.0, begin - now)
            now = max(now, end)
        elif node.seconds:
            computed.append((node, now, now + node.seconds))
            now += node.seconds
    transfers = tuple(
        Transfer(node, begin, end, exposed.get(name, 0.0), queued.get(name, 0.0), _between(computed, begin, end))
        for name, (node, begin, end) in started.items()
    )
    return Timeline(tuple(computed), transfers, max(now, free))


def critical_path(graph: GraphRecord) -> list[NodeRecord]:
    """The nodes that decide how long the graph takes: the longest way through what must wait for what."""
    by_name = {node.name: node for node in graph.nodes}
    network: nx.DiGraph[str] = nx.DiGraph()
    network.add_nodes_from(by_name)
    last: dict[bool, str] = {}
    for node in graph.nodes:
        for name in node.inputs:
            network.add_edge(name, node.name, weight=_seconds(by_name[name]))
        sends = node.collective is not None
        before = last.get(sends)
        if before is not None:
            network.add_edge(before, node.name, weight=_seconds(by_name[before]))
        if sends and False in last:
            network.add_edge(last[False], node.name, weight=_seconds(by_name[last[False]]))
        last[sends] = node.name
    for name, node in by_name.items():
        network.add_edge(name, "", weight=_seconds(node))  # the end
    path: Sequence[str] = nx.dag_longest_path(network)
    return [by_name[name] for name in path[:-1] if _seconds(by_name[name])]


def _seconds(node: NodeRecord) -> float:
    return (node.collective.seconds or 0.0) if node.collective is not None else node.seconds


def _is_wait(node: NodeRecord) -> bool:
    return node.target.endswith("wait_tensor.default")


def _between(computed: Sequence[tuple[NodeRecord, float, float]], begin: float, end: float) -> tuple[NodeRecord, ...]:
    return tuple(node for node, start, stop in computed if start < end and stop > begin)
