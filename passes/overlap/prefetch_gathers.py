"""PrefetchForwardGathers, PrefetchBackwardGathers: the next parameter is gathered while this one is used."""

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
from dsgraph.passes.ir.gathers import Gather, gathered_parameters, has_units, is_unit, kinds_in, reading_unit
from dsgraph.passes.ir.graph import KEPT, barrier_between, fake_value, is_view, is_wait, placeholders


@dataclass(frozen=True)
class PrefetchForwardGathers(GraphPass):
    """Start each parameter's gather when the parameter before has arrived; earlier if it would arrive too late.

    before:  a = wait_tensor(all_gather_into_tensor(shard_a)); y = mm(x, a)
             b = wait_tensor(all_gather_into_tensor(shard_b)); z = mm(y, b)
    after:   a = wait_tensor(all_gather_into_tensor(shard_a)); started_b = all_gather_into_tensor(shard_b); y = mm(x, a)
             b = wait_tensor(started_b); z = mm(y, b)

    The predicted times decide how much earlier. The graph is timed as if all gathers had been requested at its start:
    no schedule is faster. Then, from the last to the first, each gets the latest start with which its parameter, and
    the next ones on the link, still arrive when they are needed. On a fast link, one parameter is gathered early; on a
    slow one transfers follow each other without a gap. No gather overtakes another collective: times differ between
    ranks, and the order of collectives must not.

    A bucket (see `BucketForwardGathers`) starts when the first of the bucket before has arrived. Casts and padding of
    the shard move along. Left alone: gathers of computed tensors, of a group outside the mesh, after a barrier (an op
    that writes to an argument, or an unknown one), and gloo's own, see `gather_by_messages`.

    Attributes:
        ahead_bytes: Bytes that may be gathered, or in transfer, before their use, besides the next parameter; less if
            the memory limit leaves less.
    """

    ahead_bytes: int = 64 * 2**20

    phase: ClassVar[Phase] = Phase.FORWARD
    graph: ClassVar[str] = "step"
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
        units = [reading_unit(started) for started, _ in gathers]
        for number, unit in enumerate(units[1:], 1):
            if unit is not None and unit is units[number - 1]:  # what one unit reads is gathered at once
                places[number] = gathers[number - 1][0]
        for gather, place in zip(gathers, places, strict=True):
            if _start_after(place, gather):
                moved.add(gather[0])
            elif place < gather[0] and barrier_between(place, gather[0]):
                whose = parameter_of(gather[0], ctx)
                notes.append(f"{whose} is not gathered earlier: an op in between may write to it, or is unknown")
        moved |= self._start_in_time(gm, gathers, ctx)
        return PassResult(changed=len(moved), notes=tuple(notes))

    def _first_place(self, gm: GraphModule, first: Gather) -> Node:
        """Return the node after which the first gather starts: here it stays where it is."""
        return first[0]

    def _place_behind(self, previous: Sequence[Node], needed: Node) -> Node:
        """Return the node after which a gather starts, from the waits for the one before, and its own first wait."""
        return previous[0]

    def _start_in_time(self, gm: GraphModule, gathers: Sequence[Gather], ctx: PassContext) -> set[Node]:
        """Start gathers earlier that would arrive too late; return the moved nodes."""
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
    """Start each gather of the backward when the parameter before it is no longer used; or earlier if needed.

    before:  b = wait_tensor(all_gather_into_tensor(shard_b)); dy = mm(dz, t(b)); da = mm(t(y), dy)
             a = wait_tensor(all_gather_into_tensor(shard_a)); dx = mm(dy, t(a))
    after:   b = wait_tensor(all_gather_into_tensor(shard_b)); dy = mm(dz, t(b))
             started_a = all_gather_into_tensor(shard_a); da = mm(t(y), dy); a = wait_tensor(started_a)
             dx = mm(dy, t(a))

    A parameter's own gradient is computed during the gather, so that only one gathered parameter is alive. In the graph
    of a step a unit computes everything at once, and the parameters of the next one are gathered during it. The first
    gather starts after the last use of parameters that the forward has kept; without those, at the beginning. If there
    are only pointwise ops in between (a frozen layer), a gather starts when the parameter before has arrived.
    Everything else is as in `PrefetchForwardGathers`.
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
        last, frontier, in_step = previous, [previous], has_units(previous.graph)
        while frontier:
            for user in frontier.pop().users:
                last = max(last, user)
                if is_view(user):
                    frontier.append(user)
        node = last.next
        while last < needed and node is not needed:
            if is_unit(node) if in_step else _takes_long(node):
                return last
            node = node.next
        return previous


def _latest_places(gm: GraphModule, gathers: Sequence[Gather], ctx: PassContext) -> list[Node]:
    """Return the node after which each gather must start at the latest, so that no wait is longer than necessary."""
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
    """The limit on bytes that are gathered before their use."""

    def __init__(self, gathers: Sequence[Gather], most: int) -> None:
        self._waits = [waits_of(started)[-1] for started, _ in gathers]
        self._bytes = [number_of(started, tensor_bytes(fake_value(started))) for started, _ in gathers]
        self._most = most
        self._oldest = 0  # the first gather that may not have been waited for

    def at_or_after(self, place: Node, number: int) -> Node:
        """Return `place`, or the first later wait at which there is room for the gather of this number."""
        while self._oldest < number and self._waits[self._oldest] <= place:
            self._oldest += 1
        while self._oldest < number and sum(self._bytes[self._oldest : number + 1]) > self._most:
            place = self._waits[self._oldest]
            self._oldest += 1
        return place


def _notes_on_others(gm: GraphModule, ctx: PassContext) -> list[str]:
    """Return notes on the gathers that cannot start at any time, with reasons."""
    movable = {started for started, _ in gathered_parameters(gm, ctx.axes)}
    notes = []
    for started in collectives(gm):
        if started in movable or not is_gather(started):
            continue
        kinds = kinds_in(ctx.axes, collective_group(started))
        if not kinds:
            reason = "its group is outside the mesh"
        elif started.target not in kinds:
            reason = "gloo's own all-gathers must not overlap"
        else:
            reason = "it gathers a value that the graph computes"
        notes.append(f"{described(started)} is not started earlier: {reason}")
    return notes


def _is_read_before(value: Node, place: Node) -> bool:
    return any(_is_read_before(user, place) if is_view(user) else user < place for user in value.users)


def _takes_long(node: Node) -> bool:
    """Return whether the node computes long enough to hide a transfer; in the graph of a step only units do."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_collective(node) or is_wait(node):
        return False
    return not (is_view(node) or torch.Tag.pointwise in node.target.tags)


def _start_after(place: Node, gather: Gather) -> bool:
    """Move a gather up to directly after `place`; return False if it is there or before already, or must not move."""
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
