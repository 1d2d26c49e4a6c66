"""OffloadActivations: saved activations leave the device's memory until the backward needs them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pair import GraphPair
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import come_from, emit, fake_value
from dsgraph.passes.ir.size_nodes import SizeNodes
from dsgraph.passes.ir.transfers import note_tier

from .stored_values import StoredValue, drop_stored, find_stored, make_views

ops = torch.ops.dsgraph


@dataclass(frozen=True)
class OffloadActivations(GraphPass):
    """Move saved activations to host memory or to disk, and back before their first use in the backward.

    forward before:   x = f(a); y = g(x); z = h(y)                                      # x is saved
    forward after:    x = f(a); y = g(x); started = offload(x, "host"); z = h(y)
                      saved = finish_offload(started, x)                                # saved is saved

    backward before:  dy = dh(dz); dx = dg(dy, x)
    backward after:   result = reload(saved, ...); dy = dh(dz); x = wait_transfer(result); dx = dg(dy, x)

    Complete pieces of memory are offloaded: for a saved view the tensor that it is a view of, and the backward makes
    the view again. The offload starts after the last node of the forward that uses the memory, and ends when the
    transfer is predicted to end; on the CPU, where the copy is synchronous, immediately. A reload starts as late as the
    cost model allows, with transfers one after the other over one link, but no earlier than the limit on running
    transfers allows.

    Dynamic sizes are computed in the backward from those that it knows.

    Left alone: inputs, parameters, results of the model or of the backward, tensors that a node writes to, memory that
    no single tensor fills, sizes that the backward does not know.

    Attributes:
        tier: The tier of all saved values, "host" or "disk"; None to move only those of the plan.
        least_bytes: Smaller values stay, unless the plan names them.
        ahead_bytes: Bytes that may be in transfer, in each direction, or have arrived and are not used yet; at most an
            eighth of all offloaded bytes, or the largest value.
    """

    tier: str | None = None
    least_bytes: int = 64 * 2**10
    ahead_bytes: int = 256 * 2**20

    phase: ClassVar[Phase] = Phase.PAIR

    def run(self, pair: GraphPair, ctx: PassContext) -> PassResult:
        sizes = SizeNodes(pair.backward, saved={theirs.name for _, theirs in pair.crossing()})
        found, notes = find_stored(pair, ctx, sizes, tier=self.tier, least_bytes=self.least_bytes)
        if not found:
            return PassResult(notes=tuple(notes))
        bytes_of = [item.size for item in found]
        room = min(self.ahead_bytes, max(max(bytes_of), sum(bytes_of) // 8))
        handles = _leave(pair, found, ctx, room)
        places = _reload_places(pair, found, ctx, room)
        _come_back(pair, found, sizes, handles, places)
        return PassResult(changed=len(found), notes=tuple(notes), done=tuple(_totals(found)))


def _totals(found: Sequence[StoredValue]) -> list[str]:
    count, total = Counter(item.tier for item in found), Counter[str]()
    for item in found:
        total[item.tier] += item.size
    return [f"{count[tier]} saved values to {tier}, {total[tier]} bytes" for tier in sorted(count)]


def _leave(pair: GraphPair, found: Sequence[StoredValue], ctx: PassContext, room: int) -> dict[Node, Node]:
    """Offload each value in the forward. Return the values that cross in its place, by the value's base."""
    nodes = list(pair.forward.graph.nodes)
    number_of = {node: number for number, node in enumerate(nodes)}
    ordered = sorted(found, key=lambda item: number_of[item.forward_place])
    begins = ctx.analyses.schedule(pair.forward, ctx.costs).begins
    times = [begins[node] for node in nodes]
    asked = [times[number_of[item.forward_place] + 1] for item in ordered]
    # On its way to the disk, a value passes through host memory: then the device's is free.
    ends = earliest_ends(asked, [ctx.costs.tier_seconds("host", item.size) for item in ordered])
    sizes = [item.size for item in ordered]
    places = [item.forward_place.next for item in ordered]
    handles = dict[Node, Node]()
    started = list[Node]()
    for number, item in enumerate(ordered):
        for earlier in range(first_together(sizes, number, room=room)):
            if ordered[earlier].base not in handles:
                handles[ordered[earlier].base] = _finish(places[number], started[earlier], ordered[earlier])
        started.append(come_from(emit(places[number], ops.offload.default, item.base, item.tier), item.base))
        if fake_value(item.base).device.type == "cpu":
            handles[item.base] = _finish(started[-1].next, started[-1], item)
    for item, start, end in zip(ordered, started, ends, strict=True):
        if item.base not in handles:
            last = max(nodes[min(bisect_right(times, end), len(nodes) - 1)], start.next)
            handles[item.base] = _finish(last, start, item)
    return handles


def _finish(before: Node, started: Node, item: StoredValue) -> Node:
    return come_from(emit(before, ops.finish_offload.default, started, item.base), item.base)


def _come_back(
    pair: GraphPair,
    found: Sequence[StoredValue],
    sizes: SizeNodes,
    handles: dict[Node, Node],
    places: Sequence[Node],
) -> None:
    """Reload each value in the backward before its first use, and recreate the saved values from it."""
    inputs = pair.save_all([handles[item.base] for item in found])
    for item, saved, place in zip(found, inputs, places, strict=True):
        value = fake_value(item.base)
        shape, stride = (list(map(sizes.node, numbers)) for numbers in (value.shape, value.stride()))
        how = (shape, stride, value.dtype, value.device)
        result = emit(place, ops.reload.default, saved, *how)
        note_tier(result, item.tier)
        make_views(item, emit(item.backward_place, ops.wait_transfer.default, result), sizes)
    drop_stored(pair, found)


def _reload_places(pair: GraphPair, found: Sequence[StoredValue], ctx: PassContext, room: int) -> list[Node]:
    """Return the node of the backward before which each reload starts."""
    nodes = [node for node in pair.backward.graph.nodes if node.op != "placeholder"]
    number_of = {node: number for number, node in enumerate(nodes)}
    begins = ctx.analyses.schedule(pair.backward, ctx.costs).begins
    times = [begins[node] for node in nodes]
    sizes = [item.size for item in found]
    seconds = [ctx.costs.tier_seconds(item.tier, item.size) for item in found]
    starts = latest_starts([begins[item.backward_place] for item in found], seconds)
    places = list[Node]()
    for number, start in enumerate(starts):
        place = max(0, bisect_right(times, start) - 1)
        together = first_together(sizes, number, room=room)
        if together:  # after the first use of the last value that has no room beside it
            place = max(place, number_of[found[together - 1].backward_place])
        places.append(nodes[min(place, number_of[found[number].backward_place])])
    return places


def latest_starts(needed: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return the latest start times of transfers over one link, so that each arrives in time.

    Args:
        needed: When each is needed, in ascending order, which is that of the transfers.
        seconds: Time of each by itself.

    Returns:
        Times, in the same order; negative if even the start of the graph is too late.
    """
    starts = list[float]()
    free = float("inf")
    for need, takes in zip(reversed(needed), reversed(seconds), strict=True):
        free = min(need, free) - takes
        starts.append(free)
    return starts[::-1]


def earliest_ends(asked: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return the end times of transfers over one link that are requested at the given times, in ascending order."""
    ends, free = list[float](), 0.0
    for time, takes in zip(asked, seconds, strict=True):
        free = max(time, free) + takes
        ends.append(free)
    return ends


def first_together(sizes: Sequence[int], number: int, *, room: int) -> int:
    """Return the first of the transfers up to `number` that may run together with it within `room`.

    A transfer by itself may be larger than the room.
    """
    first, total = number, sizes[number]
    while first > 0 and total + sizes[first - 1] <= room:
        first -= 1
        total += sizes[first]
    return first
