"""SelectiveGather: with memory to spare, gathered parameters are kept for the backward."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch.fx import GraphModule, Node

from dsgraph.passes.analysis.budget import MemoryPart, choose
from dsgraph.passes.analysis.dependencies import computed_from, dependencies, readers
from dsgraph.passes.analysis.sizes import number_of, tensor_bytes
from dsgraph.passes.compat import is_tangent
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.core.notes import parameter_behind, parameter_of
from dsgraph.passes.ir.collectives import collectives, is_gather
from dsgraph.passes.ir.graph import KEPT, fake_value, is_gathered_again, is_view, placeholders, wait_of
from dsgraph.passes.ir.save_plan import Choice, decide, is_recomputed

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class SelectiveGather(GraphPass):
    """Keep the parameters whose second gather would take longest, as many as fit into the spare memory.

    before:  a = wait_tensor(all_gather_into_tensor(shard_a)); y = f(x, a)      # gathered again by the backward
    after:   a = wait_tensor(all_gather_into_tensor(shard_a)); y = f(x, a)      # a: MUST_SAVE

    A knapsack: the weight of a parameter is its size, its value the seconds that its gather takes by the cost model.
    Sizes and links are the same on every rank, and so is the spare memory, `MemoryBudget.to_keep`: so is the choice.
    Left alone: everything, if no spare memory is known, as on a CPU without the option `memory_limit`.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    keeps_gathers: ClassVar[bool] = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        budget = ctx.budget
        if budget.limit is None and budget.to_keep is None:
            return PassResult()
        graph = ctx.analyses.get(dependencies, gm)
        backward = computed_from(graph, filter(is_tangent, placeholders(gm)))
        repeated = [
            started
            for started in collectives(gm)
            if _is_gathered_again(started, ctx) and _is_read_by(backward, wait_of(started), graph)
        ]
        gathers = [started for started in repeated if not wait_of(started).meta.get(KEPT)]
        for started in repeated:
            if started not in gathers:  # kept already
                budget.take(MemoryPart.GATHERED_COPIES, started.name, _bytes(started))
        room = budget.left_to_keep
        if not gathers or room is None:
            return PassResult(notes=_why_nothing(gathers))
        sizes, seconds = list(map(_bytes, gathers)), [_seconds(started, ctx) for started in gathers]
        kept = choose(gathers, sizes, seconds, room)
        for started in kept:
            decide(wait_of(started), Choice.SAVE)
            wait_of(started).meta[KEPT] = True
            budget.take(MemoryPart.GATHERED_COPIES, started.name, _bytes(started))
        return PassResult(len(kept), _note_on_others([started for started in gathers if started not in kept], ctx))


def _is_gathered_again(started: Node, ctx: PassContext) -> bool:
    """Return whether the backward repeats the gather of a parameter; a user's own gathers depend on the batch."""
    of_parameter = is_gather(started) and parameter_behind(started, ctx) is not None
    return of_parameter and is_gathered_again(started)


def _is_read_by(backward: Set[Node], value: Node, graph: nx.DiGraph[Node]) -> bool:
    """Return whether the backward reads a value, another form of it, or a recomputed result of it."""
    return not backward.isdisjoint(readers(graph, value, through=lambda node: is_view(node) or is_recomputed(node)))


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
        f"{len(gathers)} parameters are gathered again: the memory that a step leaves under the limit is not known, "
        "because the graph reads only some of the model's parameters, or cannot run on fake tensors (sizes that "
        "depend on data, for example)",
    )


def _note_on_others(gathers: Sequence[Node], ctx: PassContext) -> tuple[str, ...]:
    if not gathers:
        return ()
    each = [
        f"{_name(started, ctx)} ({_bytes(started):,} bytes, {1e3 * _seconds(started, ctx):.2g} ms)"
        for started in gathers
    ]
    return (f"gathered again, because {ctx.budget.to_keep:,} bytes are spare: {', '.join(each)}",)
