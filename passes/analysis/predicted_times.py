"""When each node of a graph is predicted to run: the computation in one lane, transfers in another, one by one."""

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
        begins: When the computation comes to each node; to a wait: when it gets past it.
        ends: When each collective is through.
        seconds: How long each collective takes by itself.
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
    """The schedule of a graph whose collectives share one link, in program order.

    Args:
        nodes: In program order.
        costs: A collective whose time is not known counts as nothing.
        early: Collectives that are taken to have been asked for at the very start, wherever they stand.
        unwaited: Collectives whose waits are taken to cost nothing.
    """
    now = free = 0.0
    begins: dict[Node, float] = {}
    seconds: dict[Node, float] = {}
    ends: dict[Node, float] = {}
    for node in nodes:
        if is_collective(node):
            seconds[node] = costs.seconds(node) or 0.0
            free = (free if node in early else max(now, free)) + seconds[node]
            ends[node] = free
        elif is_wait(node):
            started = collective_behind(node)
            end = 0.0 if started in unwaited else ends.get(started, 0.0)
            now = max(now, end)
        begins[node] = now
        if not is_collective(node) and not is_wait(node):
            now += costs.seconds(node) or 0.0
    return PredictedTimes(begins, ends, seconds)
