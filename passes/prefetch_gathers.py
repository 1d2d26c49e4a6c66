"""PrefetchForwardGathers, PrefetchBackwardGathers: the next parameter travels while this one computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import c10d_functional

from .base import GraphPass, PassContext, PassResult, Phase
from .graph import ancestors, is_wait, mutates_inputs


@dataclass(frozen=True)
class PrefetchForwardGathers(GraphPass):
    """Start each parameter's gather right after the wait for the parameter before it.

    before:  a = wait_tensor(all_gather_into_tensor(shard_a)); y = mm(x, a)
             b = wait_tensor(all_gather_into_tensor(shard_b)); z = mm(y, b)
    after:   a = wait_tensor(all_gather_into_tensor(shard_a)); started_b = all_gather_into_tensor(shard_b); y = mm(x, a)
             b = wait_tensor(started_b); z = mm(y, b)

    So at most one gather is under way during compute, and one more parameter than before is alive. Casts and padding
    of the shard move along. Left alone: gathers of what the graph computes, and those behind an op that writes to an
    input of the graph.
    """

    phase: ClassVar[Phase] = Phase.FORWARD
    needs_mesh: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    reorders_collectives: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        gathers = [node for node in gm.graph.nodes if _gathers_an_input(node)]
        changed = 0
        for previous, started in zip(gathers, gathers[1:], strict=False):
            (wait,) = previous.users
            changed += _start_after(wait, started)
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


def _gathers_an_input(node: Node) -> bool:
    kinds = (c10d_functional.all_gather_into_tensor.default, torch.ops.dsgraph.gather_by_broadcasts.default)
    return (
        node.op == "call_function"
        and node.target in kinds
        and not any(is_wait(made_of) for made_of in ancestors(node))
        and sum(made_of.op == "placeholder" for made_of in ancestors(node)) == 1
    )


def _start_after(wait: Node, started: Node) -> bool:
    """Moves `started`, and what it is made of, up to behind `wait`; False where it is there already or may not."""
    moving = [node for node in (*ancestors(started), started) if node.op != "placeholder" and wait < node]
    passed = wait.next
    while passed is not started:
        if mutates_inputs(passed):
            return False
        passed = passed.next
    place, changed = wait, False
    for node in moving:
        if place.next is not node:
            place.append(node)
            changed = True
        place = node
    return changed
