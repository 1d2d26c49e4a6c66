"""PrefetchForwardGathers, PrefetchBackwardGathers: the next parameter travels while this one computes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.compat import OpOverload
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.core.notes import described, parameter_of
from dsgraph.passes.ir.coalesced import waits_of
from dsgraph.passes.ir.collectives import collective_group, collectives, is_collective, is_gather
from dsgraph.passes.ir.gathers import Gather, gathered_parameters, kinds_in
from dsgraph.passes.ir.graph import KEPT, barrier_between, fake_value, is_view, is_wait, placeholders


@dataclass(frozen=True)
class PrefetchForwardGathers(GraphPass):
    """Start each parameter's gather when the parameter before has arrived; earlier where it would come too late.

    before:  a = wait_tensor(all_gather_into_tensor(shard_a)); y = mm(x, a)
             b = wait_tensor(all_gather_into_tensor(shard_b)); z = mm(y, b)
    after:   a = wait_tensor(all_gather_into_tensor(shard_a)); started_b = all_gather_into_tensor(shard_b); y = mm(x, a)
             b = wait_tensor(started_b); z = mm(y, b)

    How much earlier, the predicted times decide. The graph is timed as if all gathers had been asked for at its start:
    no schedule is faster. Then, from the last to the first, each gets the latest start with which its parameter, and
    those that follow on the link, still arrive by the time at which they are needed. A fast link gathers one parameter
    ahead; on a slow one transfers follow each other without a gap. No gather overtakes another collective then: times
    differ from rank to rank, and the order of collectives must not.

    A bucket (see `BucketForwardGathers`) starts when the first of the bucket before has arrived. Casts and padding of
    the shard move along. Left alone: gathers of what the graph computes, of a group outside the mesh, behind a barrier
    (an op that writes to an argument, or an unknown one), and gloo's own, see `gather_by_messages`.

    Attributes:
        ahead_bytes: How much may be gathered, or under way, ahead of its use, besides the next parameter; less where
            the memory limit leaves less. Bytes.
    """

    ahead_bytes: int = 64 * 2**20

    phase: ClassVar[Phase] = Phase.FORWARD
    needs_mesh: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    provides: ClassVar[frozenset[str]] = frozenset({"prefetched-forward-gathers"})
    reorders_collectives: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        gathers, notes = gathered_parameters(gm, ctx.axes), _notes_on_others(gm, ctx)
        if not gathers:
            return PassResult(notes=tuple(notes))
        moved: set[Node] = set()
        first = self._first_place(gm, gathers[0])
        waits = [waits_of(started) for started, _ in gathers]
        places = [first, *(self._place_behind(before, needed[0]) for before, needed in pairwise(waits))]
        for gather, place in zip(gathers, places, strict=True):
            if _start_after(place, gather):
                moved.add(gather[0])
            elif place < gather[0] and barrier_between(place, gather[0]):
                whose = parameter_of(gather[0], ctx)
                notes.append(f"{whose} is not gathered earlier: an op in between may write, or is not known")
        moved |= self._start_in_time(gm, gathers, ctx)
        return PassResult(changed=len(moved), notes=tuple(notes))

    def _first_place(self, gm: GraphModule, first: Gather) -> Node:
        """Behind which node the first gather starts: here it stays where it is."""
        return first[0]

    def _place_behind(self, previous: Sequence[Node], needed: Node) -> Node:
        """Behind which node a gather starts, given the waits for the one before it, and the first one for itself."""
        return previous[0]

    def _start_in_time(self, gm: GraphModule, gathers: Sequence[Gather], ctx: PassContext) -> set[Node]:
        """Starts gathers earlier that would arrive too late; the nodes that were moved."""
        room = _Room(gathers, min(self.ahead_bytes, ctx.memory_left(gm)))
        started = collectives(gm)
        before = dict(zip(started[1:], started, strict=False))
        moved = set()
        for number, (gather, latest) in enumerate(zip(gathers, _latest_places(gm, gathers, ctx), strict=True)):
            place = max(latest, before.get(gather[0], latest))
            if place < gather[0] and _start_after(room.at_or_after(place, number), gather):
                moved.add(gather[0])
        return moved


@dataclass(frozen=True)
class PrefetchBackwardGathers(PrefetchForwardGathers):
    """Start each gather that the backward repeats when the parameter before it is done with; or earlier, likewise.

    before:  b = wait_tensor(all_gather_into_tensor(shard_b)); dy = mm(dz, t(b)); da = mm(t(y), dy)
             a = wait_tensor(all_gather_into_tensor(shard_a)); dx = mm(dy, t(a))
    after:   b = wait_tensor(all_gather_into_tensor(shard_b)); dy = mm(dz, t(b))
             started_a = all_gather_into_tensor(shard_a); da = mm(t(y), dy); a = wait_tensor(started_a)
             dx = mm(dy, t(a))

    A parameter's own gradient is computed meanwhile, so that no two gathered parameters are alive. The first gather
    starts when what the forward has kept, and is read before it, is done with; without that, at the beginning. Where
    nothing but pointwise ops stands in between (a frozen layer), a gather starts when the parameter before has arrived.
    All else, and what is left alone, as in `PrefetchForwardGathers`.
    """

    phase: ClassVar[Phase] = Phase.BACKWARD
    provides: ClassVar[frozenset[str]] = frozenset({"prefetched-backward-gathers"})

    def _first_place(self, gm: GraphModule, first: Gather) -> Node:
        inputs = placeholders(gm)
        needed = waits_of(first[0])[0]
        kept = [self._place(node, needed) for node in inputs if node.meta.get(KEPT) and _is_read_before(node, needed)]
        return max([*kept, inputs[-1]])

    def _place_behind(self, previous: Sequence[Node], needed: Node) -> Node:
        return max(self._place(wait, needed) for wait in previous)

    def _place(self, previous: Node, needed: Node) -> Node:
        last, frontier = previous, [previous]
        while frontier:
            for user in frontier.pop().users:
                last = max(last, user)
                if is_view(user):
                    frontier.append(user)
        node = last.next
        while last < needed and node is not needed:
            if _takes_long(node):
                return last
            node = node.next
        return previous


def _latest_places(gm: GraphModule, gathers: Sequence[Gather], ctx: PassContext) -> list[Node]:
    """Behind which node each gather must start at the latest, so that nothing waits longer than it has to."""
    nodes = list(gm.graph.nodes)
    schedule = ctx.analyses.schedule(gm, ctx.costs, early={started for started, _ in gathers})
    times = [schedule.begins[node] for node in nodes]
    inputs = sum(node.op == "placeholder" for node in nodes)
    places, latest = [], math.inf
    for started, _ in reversed(gathers):
        latest = min(latest, schedule.begins[waits_of(started)[0]]) - schedule.seconds[started]
        following = bisect_right(times, latest) - 1  # the last node that begins by then
        places.append(nodes[max(following, inputs) - 1])
    return places[::-1]


class _Room:
    """Keeps what is gathered ahead of its use within bounds."""

    def __init__(self, gathers: Sequence[Gather], most: int) -> None:
        self._waits = [waits_of(started)[-1] for started, _ in gathers]
        self._bytes = [number_of(started, tensor_bytes(fake_value(started))) for started, _ in gathers]
        self._most = most
        self._oldest = 0  # the first gather that may not have been waited for

    def at_or_after(self, place: Node, number: int) -> Node:
        """`place`, or the first wait behind it at which there is room for the gather of this number."""
        while self._oldest < number and self._waits[self._oldest] <= place:
            self._oldest += 1
        while self._oldest < number and sum(self._bytes[self._oldest : number + 1]) > self._most:
            place = self._waits[self._oldest]
            self._oldest += 1
        return place


def _notes_on_others(gm: GraphModule, ctx: PassContext) -> list[str]:
    """The gathers that cannot start at any time, and why."""
    movable = {started for started, _ in gathered_parameters(gm, ctx.axes)}
    notes = []
    for started in collectives(gm):
        if started in movable or not is_gather(started):
            continue
        kinds = kinds_in(ctx.axes, collective_group(started))
        if not kinds:
            reason = "its group is outside the mesh"
        elif started.target not in kinds:
            reason = "gloo's own gathers must not overlap"
        else:
            reason = "it is of what the graph computes"
        notes.append(f"{described(started)} is not started earlier: {reason}")
    return notes


def _is_read_before(value: Node, place: Node) -> bool:
    return any(_is_read_before(user, place) if is_view(user) else user < place for user in value.users)


def _takes_long(node: Node) -> bool:
    """Whether a transfer can hide behind the node."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_collective(node) or is_wait(node):
        return False
    return not (is_view(node) or torch.Tag.pointwise in node.target.tags)


def _start_after(place: Node, gather: Gather) -> bool:
    """Moves a gather up to behind `place`; False where it stands there or before already, or may not move."""
    started, preparations = gather
    nodes = [node for node in (*preparations, started) if place < node]
    if not nodes or barrier_between(place, nodes[-1]) is not None:
        return False
    changed = False
    for node in nodes:
        if place.next is not node:
            place.append(node)
            changed = True
        place = node
    return changed
