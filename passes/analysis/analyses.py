"""Analyses of graphs, computed once for each version of a graph.

An analysis is a function of a graph that changes nothing. Its result is valid until the graph changes. The runner drops
results when a pass reports a change. In addition, every request compares the graph with its last version, so that a
pass may ask, rewrite and ask again, and a pass that does not report its change does no harm.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch.fx import GraphModule, Node

from .cost import CostModel
from .memory import simulate
from .pieces import GraphMemory
from .predicted_times import PredictedTimes, predict

Found = TypeVar("Found")
_Version = list[tuple[Any, ...]]


@dataclass
class _Known:
    """One version of a graph, and the analyses of it."""

    version: _Version
    found: dict[Hashable, Any] = field(default_factory=dict)


class Analyses:
    """The analyses of the graphs of one compile."""

    def __init__(self) -> None:
        self._graphs: WeakKeyDictionary[GraphModule, _Known] = WeakKeyDictionary()

    def memory(self, gm: GraphModule, *, fused: bool = False) -> GraphMemory:
        """Return the memory of a graph, see `simulate`."""
        return self.get(simulate, gm, fused=fused)

    def schedule(
        self,
        gm: GraphModule,
        costs: CostModel,
        *,
        early: Collection[Node] = frozenset(),
        unwaited: Collection[Node] = frozenset(),
    ) -> PredictedTimes:
        """Return the predicted times of a graph, see `predict`."""
        key = ("schedule", id(costs), frozenset(early), frozenset(unwaited))
        compute = lambda: (costs, predict(list(gm.graph.nodes), costs, early=early, unwaited=unwaited))  # noqa: E731
        _, schedule = self.once(key, gm, compute)  # the costs are kept alive, lest another's get their id
        return schedule

    def get(self, analysis: Callable[..., Found], gm: GraphModule, **how: Hashable) -> Found:
        """Return `analysis(gm, **how)`, cached for this version of the graph."""
        return self.once((analysis, frozenset(how.items())), gm, lambda: analysis(gm, **how))

    def knows(self, gm: GraphModule) -> bool:
        """Return True if the graph has not changed since it was last asked about."""
        return gm in self._graphs and _is_same(self._graphs[gm].version, _version(gm))

    def drop(self, gm: GraphModule) -> None:
        """Forget a graph that has changed."""
        self._graphs.pop(gm, None)

    def clear(self) -> None:
        """Forget all graphs: a cached analysis keeps its graph's nodes alive."""
        self._graphs.clear()

    def once(self, key: Hashable, gm: GraphModule, compute: Callable[[], Found]) -> Found:
        """Return `compute()`, cached under a key for this version of the graph."""
        now, known = _version(gm), self._graphs.get(gm)
        if known is None or not _is_same(known.version, now):
            known = self._graphs[gm] = _Known(now)
        if key not in known.found:
            known.found[key] = compute()
        found: Found = known.found[key]
        return found


def _version(gm: GraphModule) -> _Version:
    """Return the version of a graph: its nodes with their names, arguments, values and tags."""
    return [(node, node.name, node.target, node.args, node.kwargs, *node.meta.values()) for node in gm.graph.nodes]


def _is_same(was: _Version, now: _Version) -> bool:
    """Return whether two versions have the same nodes in the same order with the same arguments and tags.

    Objects are compared by identity, because they are kept alive.
    """
    if len(was) != len(now):
        return False
    pairs = zip(was, now, strict=True)
    return all(len(before) == len(after) and all(map(operator.is_, before, after)) for before, after in pairs)
