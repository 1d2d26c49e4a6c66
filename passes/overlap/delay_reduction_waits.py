"""DelayReductionWaits: gradients are reduced while the backward continues."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.core.notes import described
from dsgraph.passes.ir.collectives import is_reduction
from dsgraph.passes.ir.gathers import made_of
from dsgraph.passes.ir.graph import barrier_between, fake_value


@dataclass(frozen=True)
class DelayReductionWaits(GraphPass):
    """Wait for each reduction when the next one starts, or later, when it has ended; for the last one at the end.

    before:  da = mm(x, dy); own_a = wait_tensor(reduce_scatter_tensor(da))
             db = mm(u, dv); own_b = wait_tensor(reduce_scatter_tensor(db))
    after:   da = mm(x, dy); started_a = reduce_scatter_tensor(da)
             db = mm(u, dv); own_a = wait_tensor(started_a); started_b = reduce_scatter_tensor(db)
             own_b = wait_tensor(started_b)

    On a fast link one reduction runs during computation, and one more gradient than before is alive; on a slow one
    several, by the predicted times. Nodes that depend only on the result (sums over ranks, averages, slices) move
    along. Left alone: a result that the backward computes with or communicates again, as in hybrid sharding. Nothing
    moves across a barrier (an op that writes to an argument, or an unknown one): the wait stays before it.

    Attributes:
        in_flight_bytes: Bytes that running reductions may read and write together; less if the memory limit leaves
            less. A larger one runs alone.
    """

    in_flight_bytes: int = 64 * 2**20

    phase: ClassVar[Phase] = Phase.BACKWARD
    graph: ClassVar[str] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    provides: ClassVar[frozenset[str]] = frozenset({"delayed-reduction-waits"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        reductions = [node for node in gm.graph.nodes if is_reduction(node)]
        end = next(iter(gm.graph.find_nodes(op="output")))
        changed, notes = 0, []
        for started, place in zip(reductions, self._places(gm, reductions, end, ctx), strict=True):
            results = made_of(started)
            if isinstance(results, str):
                notes.append(f"{described(started)} is waited for immediately: {results}")
            elif _move_ahead(results, place):
                changed += 1
        return PassResult(changed=changed, notes=tuple(notes))

    def _places(self, gm: GraphModule, reductions: Sequence[Node], end: Node, ctx: PassContext) -> list[Node]:
        """Return the node before which each reduction is waited for."""
        if not reductions:
            return []
        nodes = list(gm.graph.nodes)
        schedule = ctx.analyses.schedule(gm, ctx.costs, unwaited=set(reductions))
        times = [schedule.begins[node] for node in nodes]
        most = min(self.in_flight_bytes, ctx.memory_left(gm))
        sizes = [_bytes(started) for started in reductions]
        places = []
        for number, started in enumerate(reductions):
            following = reductions[number + 1] if number + 1 < len(reductions) else end
            through = bisect_left(times, schedule.ends[started])
            place = max(following, nodes[through] if through < len(nodes) else end)
            total = sizes[number]
            for later in range(number + 1, len(reductions)):
                total += sizes[later]
                if total > most:
                    place = min(place, reductions[later])
                    break
            places.append(place)
        return places


def _bytes(started: Node) -> int:
    """Return the bytes that a reduction reads and writes."""
    return number_of(started, tensor_bytes([fake_value(node) for node in (started, *started.all_input_nodes)]))


def _move_ahead(nodes: list[Node], place: Node) -> bool:
    """Move `nodes` down to directly before `place`, or the first barrier on the way; return False if nothing moves."""
    if place < nodes[0]:
        return False
    place = barrier_between(nodes[0], place) or place
    if place < nodes[-1]:
        return False
    before = place.prev
    for node in reversed(nodes):
        if before is not node:
            break
        before = before.prev
    else:
        return False
    for node in nodes:
        place.prepend(node)
    return True
