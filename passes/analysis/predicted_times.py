"""Predicted times of the nodes of a graph: computation in one lane, transfers one by one in another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from dsgraph.passes.ir.coalesced import collective_behind
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import is_wait

from .cost import CostModel


@dataclass(frozen=True)
class PredictedTimes:
    """Predicted times, in seconds from the start of a graph.

    Attributes:
        begins: When the computation reaches each node; for a wait: when it passes it.
        ends: When each collective ends.
        seconds: Time of each collective by itself.
    """

    begins: Mapping[Node, float]
    ends: Mapping[Node, float]
    seconds: Mapping[Node, float]


def predict(
    nodes: Sequence[Node],
    costs: CostModel,
    *,
    early: Collection[Node] = frozenset(),
    unwaited: Collection[Node] = frozenset(),
) -> PredictedTimes:
    """Return the schedule of a graph whose collectives share one link, in program order.

    Args:
        nodes: The nodes, in program order.
        costs: The cost model; a collective of unknown time counts as 0.
        early: Collectives that are assumed to start at the beginning, wherever they are.
        unwaited: Collectives whose waits are assumed to cost nothing.
    """
    now = free = delay = 0.0
    begins: dict[Node, float] = {}
    seconds: dict[Node, float] = {}
    ends: dict[Node, float] = {}
    for node in nodes:
        begins[node] = now
        if is_collective(node):
            seconds[node] = costs.seconds(node) or 0.0
            free = (free if node in early else max(now, free)) + seconds[node]
            ends[node] = free
            delay += costs.delay_seconds(node)
        elif is_wait(node):
            started = collective_behind(node)
            begins[node] = max(now, 0.0 if started in unwaited else ends.get(started, 0.0))
            now, delay = begins[node], max(0.0, delay - (begins[node] - now))  # nothing is delayed meanwhile
        elif took := costs.seconds(node) or 0.0:
            now, delay = now + took + delay, 0.0
    return PredictedTimes(begins, ends, seconds)
