"""KeepLastGather, ReleaseKeptGather: the parameter that the forward gathers last is kept for the backward."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext.units import RUN_BACKWARD, RUN_FORWARD
from dsgraph.passes.analysis.budget import MemoryPart
from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.compat import is_tangent
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.core.notes import parameter_of
from dsgraph.passes.ir.collectives import collectives, is_collective, is_gather
from dsgraph.passes.ir.gathers import is_unit
from dsgraph.passes.ir.graph import (
    KEPT,
    barrier_between,
    fake_value,
    find_calls,
    is_barrier,
    is_gathered_again,
    is_view,
    placeholders,
    wait_of,
)
from dsgraph.passes.ir.save_plan import Choice, decide


@dataclass(frozen=True)
class KeepLastGather(GraphPass):
    """In a graph that ends in a loss, keep the parameter that is gathered last for the backward.

    before:  last = wait_tensor(all_gather_into_tensor(shard)); loss = f(x, last)      # gathered again
    after:   last = wait_tensor(all_gather_into_tensor(shard)); loss = f(x, last)      # last: MUST_SAVE

    The backward of a loss begins where the forward ends, usually with the output layer's weight: gathering it again
    would have to be waited for with nothing to compute. In the graph of a step, all parameters of the last unit are
    kept if the backward begins with it. Left alone: other graphs without an output of one element to differentiate,
    whose backward may be far away.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    keeps_gathers: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        tangents = [node.meta["val"] for node in placeholders(gm) if is_tangent(node)]
        gathers = [started for started in collectives(gm) if is_gather(started) and is_gathered_again(started)]
        if find_calls(gm, RUN_BACKWARD):
            kept = _of_last_unit(gm, gathers)
            for started in kept:
                _keep(started, ctx)
            return PassResult(changed=len(kept))
        if not any(isinstance(value, torch.Tensor) and value.dim() == 0 for value in tangents):
            return PassResult(notes=_why_nothing(gathers, ctx) if tangents else ())
        if not gathers:
            return PassResult(changed=0)
        _keep(gathers[-1], ctx)
        return PassResult(changed=1)


def _keep(started: Node, ctx: PassContext) -> None:
    kept = wait_of(started)
    decide(kept, Choice.SAVE)
    kept.meta[KEPT] = True
    ctx.budget.take(MemoryPart.GATHERED_COPIES, started.name, _bytes(started))


def _of_last_unit(gm: GraphModule, gathers: list[Node]) -> list[Node]:
    """Return the gathers of the last unit of a step's forward, if the backward begins with it.

    If the unit reads more than every other unit, as in a model that is one graph, only the last gather is returned.
    """
    known = set(gathers)
    forwards, backwards = (
        {node.args[0]: found for node in find_calls(gm, target) if (found := _gathered_for(node, known))}
        for target in (RUN_FORWARD, RUN_BACKWARD)
    )
    last = [call for call in forwards if call in backwards][-1:]
    if not last or last != list(backwards)[:1]:
        return []
    sizes = {call: sum(_bytes(started) for started in found) for call, found in backwards.items()}
    kept = backwards[last[0]]
    return kept if sizes.pop(last[0]) <= max(sizes.values(), default=0) else kept[-1:]


def _gathered_for(unit: Node, gathers: Collection[Node]) -> list[Node]:
    """Return the gathers of the parameters that a unit reads."""
    found = []
    for node in unit.all_input_nodes:
        while node.op == "call_function" and node not in gathers and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        found += [node] if node in gathers else []
    return found


def _bytes(started: Node) -> int:
    return number_of(started, tensor_bytes(fake_value(wait_of(started))))


def _why_nothing(gathers: list[Node], ctx: PassContext) -> tuple[str, ...]:
    if not gathers:
        return ()
    last = parameter_of(gathers[-1], ctx)
    return (f"{last} is not kept for the backward: no differentiated output is a scalar, such as a loss",)


@dataclass(frozen=True)
class ReleaseKeptGather(GraphPass):
    """Use the kept parameter as soon as its operands are ready, so that it can be freed.

    before:  dw = mm(t(dy), x); own = wait_tensor(reduce_scatter_tensor(dw)); dx = mm(dy, kept)
    after:   dx = mm(dy, kept); dw = mm(t(dy), x); own = wait_tensor(reduce_scatter_tensor(dw))

    The largest parameter of many models, its gradient and that gradient's transfer would be alive at once otherwise.
    Left alone: nodes that would have to move across a barrier (an op that writes to an argument, or an unknown one),
    collectives, and units of a step, whose gradients are to be sent before the next unit runs.
    """

    phase: ClassVar[Phase] = Phase.BACKWARD
    graph: ClassVar[str] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        changed = 0
        frontier = [node for node in placeholders(gm) if node.meta.get(KEPT)]
        while frontier:
            for user in list(frontier.pop().users):
                changed += _hoist(user)
                if is_view(user):
                    frontier.append(user)
        return PassResult(changed=changed)


def _hoist(node: Node) -> bool:
    """Move `node` up to directly after its operands; return False if it is there already or must stay."""
    if node.op != "call_function" or is_collective(node) or is_barrier(node) or is_unit(node):
        return False
    place = max(node.all_input_nodes)
    while place.next.op == "placeholder":
        place = place.next
    if place.next is node or barrier_between(place, node) is not None:
        return False
    place.append(node)
    return True
