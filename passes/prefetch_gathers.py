"""PrefetchForwardGathers, PrefetchBackwardGathers: the next parameter travels while this one computes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import c10d_functional

from .base import GraphPass, PassContext, PassResult, Phase
from .compat import OpOverload
from .graph import barrier_between, collective_group, collectives, is_collective, is_view, is_wait, wait_of
from .notes import described, parameter_of

aten = torch.ops.aten

_GATHERS = (c10d_functional.all_gather_into_tensor.default, torch.ops.dsgraph.gather_by_messages.default)


@dataclass(frozen=True)
class PrefetchForwardGathers(GraphPass):
    """Start each parameter's gather right after the wait for the parameter before it.

    before:  a = wait_tensor(all_gather_into_tensor(shard_a)); y = mm(x, a)
             b = wait_tensor(all_gather_into_tensor(shard_b)); z = mm(y, b)
    after:   a = wait_tensor(all_gather_into_tensor(shard_a)); started_b = all_gather_into_tensor(shard_b); y = mm(x, a)
             b = wait_tensor(started_b); z = mm(y, b)

    So one gather is under way during compute, and one more parameter than before is alive. Casts and padding of the
    shard move along. Left alone: gathers of what the graph computes, of a group outside the mesh, behind a barrier
    (an op that writes to an argument, or an unknown one), and gloo's own, see `gather_by_messages`.
    """

    phase: ClassVar[Phase] = Phase.FORWARD
    needs_mesh: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    reorders_collectives: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        changed, notes = 0, _notes_on_others(gm, ctx)
        for (previous, _), (started, preparations) in pairwise(_gathered_parameters(gm, ctx)):
            place = self._place(wait_of(previous), wait_of(started))
            if _start_after(place, [*preparations, started]):
                changed += 1
            elif any(place < node for node in (*preparations, started)) and barrier_between(place, started):
                notes.append(
                    f"{parameter_of(started, ctx)} is not gathered earlier: an op in between may write, or is not known"
                )
        return PassResult(changed=changed, notes=tuple(notes))

    def _place(self, previous: Node, needed: Node) -> Node:
        """Behind which node a gather starts, given the waits for the one before it and for itself."""
        return previous


@dataclass(frozen=True)
class PrefetchBackwardGathers(PrefetchForwardGathers):
    """Start each gather that the backward repeats as soon as the parameter before it is done with.

    before:  b = wait_tensor(all_gather_into_tensor(shard_b)); dy = mm(dz, t(b)); da = mm(t(y), dy)
             a = wait_tensor(all_gather_into_tensor(shard_a)); dx = mm(dy, t(a))
    after:   b = wait_tensor(all_gather_into_tensor(shard_b)); dy = mm(dz, t(b))
             started_a = all_gather_into_tensor(shard_a); da = mm(t(y), dy); a = wait_tensor(started_a)
             dx = mm(dy, t(a))

    A parameter's own gradient is computed meanwhile, so that no two gathered parameters are alive. Where nothing but
    pointwise ops stands in between (a frozen layer), as in `PrefetchForwardGathers`.
    """

    phase: ClassVar[Phase] = Phase.BACKWARD

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


# What may stand between a shard and its gather.
_PREPARATIONS = (aten._to_copy.default, aten.constant_pad_nd.default, torch.ops.prims.convert_element_type.default)


def _gathered_parameters(gm: GraphModule, ctx: PassContext) -> list[tuple[Node, list[Node]]]:
    """Each gather that can start at any time, and what it is made of, in program order."""
    found = []
    for started in collectives(gm):
        if started.target not in _kinds(ctx, collective_group(started)):
            continue
        preparations, source = [], started.all_input_nodes[0]
        while source.op == "call_function" and (is_view(source) or source.target in _PREPARATIONS):
            preparations.append(source)
            source = source.all_input_nodes[0]
        if source.op == "placeholder":
            found.append((started, preparations[::-1]))
    return found


def _notes_on_others(gm: GraphModule, ctx: PassContext) -> list[str]:
    """The gathers that cannot start at any time, and why."""
    movable = {started for started, _ in _gathered_parameters(gm, ctx)}
    notes = []
    for started in collectives(gm):
        if started in movable or started.target not in _GATHERS:
            continue
        kinds = _kinds(ctx, collective_group(started))
        if not kinds:
            reason = "its group is outside the mesh"
        elif started.target not in kinds:
            reason = "gloo's own gathers must not overlap"
        else:
            reason = "it is of what the graph computes"
        notes.append(f"{described(started)} is not started earlier: {reason}")
    return notes


def _kinds(ctx: PassContext, group: str) -> tuple[object, ...]:
    by_messages = torch.ops.dsgraph.gather_by_messages.default
    backends = {axis.backend for axis in ctx.axes if axis.group == group}
    if not backends:
        return ()  # a user's own group
    if "gloo" in backends:
        return (by_messages,)  # two of its own gathers must never be under way at once
    return (c10d_functional.all_gather_into_tensor.default, by_messages)


def _takes_long(node: Node) -> bool:
    """Whether a transfer can hide behind the node."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_collective(node) or is_wait(node):
        return False
    return not (is_view(node) or torch.Tag.pointwise in node.target.tags)


def _start_after(wait: Node, nodes: list[Node]) -> bool:
    """Moves `nodes` up to behind `wait`; False where they stand there or before already, or may not move."""
    nodes = [node for node in nodes if wait < node]
    if not nodes:
        return False
    if barrier_between(wait, nodes[-1]) is not None:
        return False
    place, changed = wait, False
    for node in nodes:
        if place.next is not node:
            place.append(node)
            changed = True
        place = node
    return changed
