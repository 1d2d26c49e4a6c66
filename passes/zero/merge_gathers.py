"""MergeGathers: one marker a parameter a graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from dsgraph.passes.compat import HigherOrderOperator, is_to_local, set_grad_enabled
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.core.notes import parameter_of
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker, replace_and_erase

_CONTROL_FLOW = frozenset({"cond", "while_loop", "map_impl", "scan", "associative_scan"})


@dataclass(frozen=True)
class MergeGathers(GraphPass):
    """Let every use of a parameter share one `gather_param`, so that it is gathered and reduced once.

    before:  a = p.to_local(); w1 = gather_param(a); y = linear(x, w1)
             b = p.to_local(); w2 = gather_param(b); z = linear(y, w2)
    after:   a = p.to_local(); w1 = gather_param(a); y = linear(x, w1); z = linear(y, w1)

    It runs before autograd, which then adds up the two gradients before the one reduction. Left alone: markers in
    different checkpoint regions (they share a gather, see `InsertZeroCollectives`, but their gradients are reduced
    separately), markers under different grad modes (one of the two must not receive a gradient), arguments of control
    flow, which must not be one tensor twice, and parameters that the graph may write to.
    """

    phase: ClassVar[Phase] = Phase.CAPTURE
    graph: ClassVar[str] = "step"
    changes_collectives: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"merged-gathers"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        # With which grad mode the body of a checkpoint region starts is not known here: it matches no other.
        modes = ((module, not ctx.inference if module is gm else None) for module in all_graph_modules(gm))
        changed = sum(_merge(module, mode) for module, mode in modes)
        return PassResult(
            changed=changed, notes=(*_notes_on_uses(gm, ctx), *_notes_on_regions(gm), *_notes_on_sums(gm, ctx))
        )


def _notes_on_uses(gm: GraphModule, ctx: PassContext) -> list[str]:
    """Return notes on parameters that the graph gathers more than once all the same."""
    uses: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        if is_gather_marker(node):
            uses.setdefault(_sources(node)[-1], []).append(node)
    notes = []
    for parameter, markers in uses.items():
        if len(markers) > 1:
            read = all(_is_only_read(source) for node in markers for source in _sources(node))
            reason = "its uses differ in grad mode" if read else "the graph may write to it"
            notes.append(f"{parameter_of(parameter, ctx)} is gathered {len(markers)} times: {reason}")
    return notes


def _notes_on_regions(gm: GraphModule) -> list[str]:
    """Return notes on the number of gradients that checkpoint regions reduce."""
    counts = [sum(map(is_gather_marker, module.graph.nodes)) for module in all_graph_modules(gm) if module is not gm]
    inside = [count for count in counts if count]
    if not inside:
        return []
    return [f"checkpoint regions reduce their gradients separately: {sum(inside)} in {len(inside)} regions"]


def _notes_on_sums(gm: GraphModule, ctx: PassContext) -> list[str]:
    """Return notes on accumulated gradients that are not reduced together with the gradients of this graph."""
    markers = [
        node
        for module in all_graph_modules(gm)
        for node in module.graph.nodes
        if is_gather_marker(node)
        and len(node.args) > 3
        and node.args[3] is not None
        and not node.kwargs.get("adds_sum")
    ]
    names = dict.fromkeys(parameter_of(_sources(node)[-1], ctx) for node in markers)
    return [
        f"the accumulated gradient of {name} is reduced separately after the backward: the graph also reads the "
        "shard, or reads the parameter in an op that may not run"
        for name in names
    ]


def _sources(marker: Node) -> list[Node]:
    """Return the inputs of a marker: accumulated gradient and gathered copy, if any, shard, and its parameter."""
    shard = marker.all_input_nodes[0]
    return [*marker.all_input_nodes[:0:-1], shard, *shard.all_input_nodes]


def _merge(gm: GraphModule, grad_mode: object) -> int:
    first: dict[Hashable, Node] = {}
    merged = 0
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is set_grad_enabled:
            grad_mode = node.args[0]  # every change of the mode is a node of the graph
        elif is_to_local(node) or is_gather_marker(node):
            if not all(_is_only_read(argument) for argument in node.all_input_nodes):
                continue
            if any(_takes_each_once(user) for user in node.users):
                continue
            key = (is_gather_marker(node), repr(node.args), repr(node.kwargs), grad_mode)
            if key in first:
                merged += is_gather_marker(node)
                replace_and_erase(node, first[key])
            else:
                first[key] = node
    return merged


def _takes_each_once(node: Node) -> bool:
    """Return True for control flow, which torch refuses if two of its arguments share memory."""
    target = node.target
    return isinstance(target, HigherOrderOperator) and target.name() in _CONTROL_FLOW


def _is_only_read(node: Node) -> bool:
    """Return whether all uses of a parameter, a shard or a gathered copy are known not to change it."""
    return all(
        is_to_local(user) or is_gather_marker(user) or isinstance(user.target, HigherOrderOperator)
        for user in node.users
    )
