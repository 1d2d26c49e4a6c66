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
from .graph import collective_group, collectives, mutates_arguments, wait_of

aten = torch.ops.aten


@dataclass(frozen=True)
class PrefetchForwardGathers(GraphPass):
    """Start each parameter's gather right after the wait for the parameter before it.

    before:  a = wait_tensor(all_gather_into_tensor(shard_a)); y = mm(x, a)
             b = wait_tensor(all_gather_into_tensor(shard_b)); z = mm(y, b)
    after:   a = wait_tensor(all_gather_into_tensor(shard_a)); started_b = all_gather_into_tensor(shard_b); y = mm(x, a)
             b = wait_tensor(started_b); z = mm(y, b)

    So one gather is under way during compute, and one more parameter than before is alive. Casts and padding of the
    shard move along. Left alone: gathers of what the graph computes, of a group outside the mesh, behind an op that
    writes to one of its arguments, and gloo's own, see `gather_by_broadcasts`.
    """

    phase: ClassVar[Phase] = Phase.FORWARD
    needs_mesh: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    reorders_collectives: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        changed = 0
        for (previous, _), (started, preparations) in pairwise(_gathered_parameters(gm, ctx)):
            changed += _start_after(wait_of(previous), [*preparations, started])
        return PassResult(changed=changed)


@dataclass(frozen=True)
class PrefetchBackwardGathers(PrefetchForwardGathers):
    """As `PrefetchForwardGathers`, for the gathers that the backward repeats.

    before:  b = wait_tensor(all_gather_into_tensor(shard_b)); dy = mm(dz, t(b))
             a = wait_tensor(all_gather_into_tensor(shard_a)); dx = mm(dy, t(a))
    after:   b = wait_tensor(all_gather_into_tensor(shard_b)); started_a = all_gather_into_tensor(shard_a)
             dy = mm(dz, t(b)); a = wait_tensor(started_a); dx = mm(dy, t(a))
    """

    phase: ClassVar[Phase] = Phase.BACKWARD


# What may stand between a shard and its gather.
_PREPARATIONS = (aten._to_copy.default, aten.constant_pad_nd.default, torch.ops.prims.convert_element_type.default)


def _gathered_parameters(gm: GraphModule, ctx: PassContext) -> list[tuple[Node, list[Node]]]:
    """Each gather that can start at any time, and what it is made of, in program order."""
    found = []
    for started in collectives(gm):
        if started.target not in _kinds(ctx, collective_group(started)):
            continue
        preparations, source = [], started.all_input_nodes[0]
        while source.op == "call_function" and (_is_view(source) or source.target in _PREPARATIONS):
            preparations.append(source)
            source = source.all_input_nodes[0]
        if source.op == "placeholder":
            found.append((started, preparations[::-1]))
    return found


def _kinds(ctx: PassContext, group: str) -> tuple[object, ...]:
    by_broadcasts = torch.ops.dsgraph.gather_by_broadcasts.default
    backends = {axis.backend for axis in ctx.axes if axis.group == group}
    if not backends:
        return ()  # a user's own group
    if "gloo" in backends:
        return (by_broadcasts,)  # two of its own gathers must never be under way at once
    return (c10d_functional.all_gather_into_tensor.default, by_broadcasts)


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def _start_after(wait: Node, nodes: list[Node]) -> bool:
    """Moves `nodes` up to behind `wait`; False where they stand there or before already, or may not move."""
    nodes = [node for node in nodes if wait < node]
    if not nodes:
        return False
    passed = wait.next
    while passed is not nodes[-1]:
        if mutates_arguments(passed):
            return False
        passed = passed.next
    place, changed = wait, False
    for node in nodes:
        if place.next is not node:
            place.append(node)
            changed = True
        place = node
    return changed
