"""Predicted times of the nodes of a graph: computation in one lane, transfers in others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from dsgraph.tools.dumping.records import GraphRecord, NodeRecord

_WAITS = tuple(f".{name}.default" for name in ("wait_tensor", "wait_transfer", "take_parameter", "finish_offload"))


@dataclass(frozen=True)
class Transfer:
    """A collective, or a transfer between memory and a tier below it, from its start to its end.

    Attributes:
        node: The node that starts it.
        start: Its start, in seconds from the start of the graph.
        end: Its end, in seconds from the start of the graph.
        exposed: Seconds for which the computation stands still for it.
        queued: The part of `exposed` in which other transfers run and this one has not begun. Seconds.
        behind: The nodes that compute during the transfer.
    """

    node: NodeRecord
    start: float
    end: float
    exposed: float
    queued: float
    behind: tuple[NodeRecord, ...]


@dataclass(frozen=True)
class Timeline:
    """A predicted timeline of a graph.

    Attributes:
        computed: Nodes that take time, with start and end of each. Seconds.
        transfers: Collectives and transfers between tiers, in program order.
        seconds: Until everything is done.
    """

    computed: tuple[tuple[NodeRecord, float, float], ...]
    transfers: tuple[Transfer, ...]
    seconds: float

    @property
    def collectives(self) -> tuple[Transfer, ...]:
        """Those transfers that are between ranks."""
        return tuple(transfer for transfer in self.transfers if transfer.node.collective is not None)

    @property
    def moves(self) -> tuple[Transfer, ...]:
        """Those transfers that are between memory and a tier below it."""
        return tuple(transfer for transfer in self.transfers if transfer.node.transfer is not None)

    @property
    def exposed(self) -> float:
        """Seconds for which the computation waits in total."""
        return sum(transfer.exposed for transfer in self.transfers)


def simulate(graph: GraphRecord) -> Timeline:
    """Simulate a graph as `predict` of passes/analysis does, which needs torch; transfers to tiers have links, too."""
    now = delay = 0.0  # when the computation is ready for the next; by how much it is late
    free: dict[str, float] = {}  # when each link is
    computed: list[tuple[NodeRecord, float, float]] = []
    started: dict[str, tuple[NodeRecord, float, float]] = {}
    started_by: dict[str, str] = {}  # what a wait may read -> the collective
    exposed: dict[str, float] = {}
    queued: dict[str, float] = {}
    for node in graph.nodes:
        link = _link(node)
        if link is not None:
            begin = max(now, free.get(link, 0.0))
            free[link] = begin + _seconds(node)
            started[node.name] = (node, begin, free[link])
            delay += node.collective.delay if node.collective else 0.0
            started_by[node.name] = node.name
        elif node.target == "operator.getitem" and node.inputs[0] in started_by:
            started_by[node.name] = started_by[node.inputs[0]]  # one result of a coalesced collective
        elif node.target.endswith(_WAITS) and node.inputs and node.inputs[0] in started_by:
            name = started_by[node.inputs[0]]
            _, begin, end = started[name]
            exposed[name] = exposed.get(name, 0.0) + max(0.0, end - now)
            queued[name] = queued.get(name, 0.0) + max(0.0, begin - now)
            now, delay = max(now, end), max(0.0, delay - max(0.0, end - now))
        elif node.seconds:
            computed.append((node, now, now + node.seconds + delay))
            now, delay = now + node.seconds + delay, 0.0
    transfers = []
    for name, (node, begin, end) in started.items():
        behind = tuple(each for each, start, stop in computed if start < end and stop > begin)
        transfers.append(Transfer(node, begin, end, exposed.get(name, 0.0), queued.get(name, 0.0), behind))
    return Timeline(tuple(computed), tuple(transfers), max([now, *free.values()]))


def critical_path(graph: GraphRecord) -> list[NodeRecord]:
    """Return the critical path: the longest chain of nodes that wait for each other, which decides the graph's time."""
    by_name = {node.name: node for node in graph.nodes}
    network: nx.DiGraph[str] = nx.DiGraph()
    network.add_nodes_from(by_name)
    last: dict[str | None, str] = {}
    for node in graph.nodes:
        for name in node.inputs:
            network.add_edge(name, node.name, weight=_seconds(by_name[name]))
        link = _link(node)
        before = last.get(link)
        if before is not None:
            network.add_edge(before, node.name, weight=_seconds(by_name[before]))
        if link is not None and None in last:
            network.add_edge(last[None], node.name, weight=_seconds(by_name[last[None]]))
        last[link] = node.name
    for name, node in by_name.items():
        network.add_edge(name, "", weight=_seconds(node))  # the end
    path: Sequence[str] = nx.dag_longest_path(network)
    return [by_name[name] for name in path[:-1] if _seconds(by_name[name])]


def _link(node: NodeRecord) -> str | None:
    """Return the link that a node's transfer uses: the network (""), or the way to a tier. None: the node computes."""
    if node.collective is not None:
        return ""
    return node.transfer.tier if node.transfer is not None else None


def _seconds(node: NodeRecord) -> float:
    if node.collective is not None:
        return node.collective.seconds or 0.0
    return node.transfer.seconds if node.transfer is not None else node.seconds
