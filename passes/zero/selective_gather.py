"""SelectiveGather: with memory to spare, what the forward has gathered is kept for the backward."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from dsgraph.passes.analysis.cost import number_of, tensor_bytes
from dsgraph.passes.analysis.knapsack import most_valuable
from dsgraph.passes.compat import is_tangent
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.core.notes import parameter_behind, parameter_of
from dsgraph.passes.ir.graph import GATHERS, KEPT, collectives, fake_value, is_gathered_again, is_view, wait_of
from dsgraph.passes.ir.save_plan import Choice, choose, is_recomputed


@dataclass(frozen=True)
class SelectiveGather(GraphPass):
    """Keep the parameters whose second gather would take longest, as many as the memory to spare can hold.

    before:  a = wait_tensor(all_gather_into_tensor(shard_a)); y = f(x, a)      # gathered again by the backward
    after:   a = wait_tensor(all_gather_into_tensor(shard_a)); y = f(x, a)      # a: MUST_SAVE

    A knapsack: the weight of a parameter is its size, its value the seconds that its gather takes by the cost model.
    Sizes and links are the same on every rank, and so is the memory to spare, `PassContext.keep_bytes`: so is the
    choice. Left alone: everything, where nothing is known to be to spare, as on a CPU without the option
    `memory_limit`.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    needs_mesh: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    keeps_gathers: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        if ctx.memory_limit is None and ctx.keep_bytes is None:
            return PassResult()
        backward = _backward(gm)
        repeated = [
            started
            for started in collectives(gm)
            if _is_gathered_again(started, ctx) and _is_read_by(backward, wait_of(started))
        ]
        gathers = [started for started in repeated if not wait_of(started).meta.get(KEPT)]
        if not gathers or ctx.keep_bytes is None:
            return PassResult(notes=_why_nothing(gathers))
        room = ctx.keep_bytes - sum(_bytes(started) for started in repeated if started not in gathers)
        sizes, seconds = map(_bytes, gathers), (_seconds(started, ctx) for started in gathers)
        numbers = most_valuable(list(sizes), list(seconds), room=room)
        for number in numbers:
            kept = wait_of(gathers[number])
            choose(kept, Choice.SAVE)
            kept.meta[KEPT] = True
        again = [started for number, started in enumerate(gathers) if number not in set(numbers)]
        return PassResult(len(numbers), _note_on_others(again, ctx))


def _is_gathered_again(started: Node, ctx: PassContext) -> bool:
    """Whether the backward repeats the gather of a parameter; a user's own gathers depend on the batch."""
    of_parameter = started.target in GATHERS and parameter_behind(started, ctx) is not None
    return of_parameter and is_gathered_again(started)


def _backward(gm: GraphModule) -> set[Node]:
    """All that is computed from the gradients that come in."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_read_by(nodes: Set[Node], value: Node) -> bool:
    """Whether some of `nodes` read a value, another form of it, or what the backward computes from it again."""
    seen, frontier = {value}, [value]
    while frontier:
        for user in set(frontier.pop().users) - seen:
            if user in nodes:
                return True
            if is_view(user) or is_recomputed(user):
                seen.add(user)
                frontier.append(user)
    return False


def _bytes(started: Node) -> int:
    return number_of(started, tensor_bytes(fake_value(started)))


def _seconds(started: Node, ctx: PassContext) -> float:
    return ctx.costs.seconds(started) or 0.0


def _name(started: Node, ctx: PassContext) -> str:
    return parameter_of(started, ctx).removeprefix("parameter ")


def _why_nothing(gathers: Sequence[Node]) -> tuple[str, ...]:
    if not gathers:
        return ()
    return (
        f"{len(gathers)} parameters are gathered again: what a step leaves of the memory limit is not known, because "
        "the graph reads a part of the model's parameters, or cannot be run on fake tensors (sizes that only the data "
        "decide, say)",
    )


def _note_on_others(gathers: Sequence[Node], ctx: PassContext) -> tuple[str, ...]:
    if not gathers:
        return ()
    each = [
        f"{_name(started, ctx)} ({_bytes(started):,} bytes, {1e3 * _seconds(started, ctx):.2g} ms)"
        for started in gathers
    ]
    return (f"gathered again, because {ctx.keep_bytes:,} bytes are to spare for all: {', '.join(each)}",)
