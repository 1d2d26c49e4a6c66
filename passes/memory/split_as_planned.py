"""Splitting of a joint graph by a plan that decides every value: without the search for a minimum cut.

Torch's partitioner copies a joint graph five times and searches it, also where nothing is left to choose. A planned
graph is split often, so that its memory can be simulated.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsgraph.passes.compat import (
    HigherOrderOperator,
    OpOverload,
    captured_input,
    describe_saved,
    is_tangent,
    kind_of_saved_value,
    make_graph_module,
)
from dsgraph.passes.ir.blocks import is_plain
from dsgraph.passes.ir.graph import mutates_arguments, placeholders
from dsgraph.passes.ir.save_plan import Choice, must

from .forward_values import of_gradients, sources_of
from .replay import backward_steps


def split_as_planned(
    gm: GraphModule, *, saved: Collection[str], repeated: Collection[str], outputs: int
) -> tuple[GraphModule, GraphModule] | None:
    """Return the forward and the backward of a joint graph, equal to those of torch's partitioner.

    Args:
        gm: A joint graph without duplicate nodes; it is not changed.
        saved: Names of the values that the forward saves.
        repeated: Names of the values that the backward recomputes.
        outputs: Number of the graph's outputs that are the model's; they come first.

    Returns:
        None if the plan leaves a choice, or if the graph needs more than a split: dynamic sizes, random numbers that
            are drawn again, nodes that write to an argument, higher-order ops.
    """
    if not all(map(_is_simple, gm.graph.nodes)):
        return None
    (output,) = gm.graph.find_nodes(op="output")
    gradients = of_gradients(gm)
    forced = {node.name for node in gm.graph.nodes if must(node, Choice.SAVE)} - set(repeated)
    chosen = forced.union(saved)
    kept = frozenset(node for node in gm.graph.nodes if node not in gradients and node.name in chosen)
    steps = list(backward_steps(gm, gradients, kept))
    again = [node for node, is_again in steps if is_again]
    crossing = _crossing(gm, [node for node, _ in steps], output.args[0][outputs:])
    if any(node.name not in repeated or _draws(node) for node in again):
        return None
    if any(node.op == "call_function" and node not in kept for node in crossing):
        return None
    descs = output.meta.get("desc", [None] * len(output.args[0]))
    inputs = placeholders(gm)
    ahead = _forward_nodes(gm, gradients, [*output.args[0][:outputs], *crossing])
    forward = _extract(
        [node for node in inputs if not is_tangent(node)],
        ahead,
        [*output.args[0][:outputs], *crossing],
        descs=descs[:outputs],
    )
    describe_saved(forward.find_nodes(op="output")[0], outputs, added=len(crossing))
    behind = _constants(gm, [node for node, _ in steps])
    backward = _extract(
        [*crossing, *filter(is_tangent, inputs)], behind, output.args[0][outputs:], descs=descs[outputs:]
    )
    for node in backward.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True  # as torch's partitioner marks them
    return make_graph_module(gm, forward), make_graph_module(gm, backward)


def _is_simple(node: Node) -> bool:
    """Return whether a node of a joint graph can be copied into the forward or the backward as it is."""
    if node.op == "placeholder" and captured_input(node) is None and not is_tangent(node):
        return False
    if not _has_fixed_sizes(node.meta.get("val")) or mutates_arguments(node):
        return False
    is_placed = str(node.meta.get("partitioner_tag")).startswith("must_be_in")
    return not (
        is_placed or node.meta.get("saved_tensor_with_no_vc_check") or isinstance(node.target, HigherOrderOperator)
    )


def _has_fixed_sizes(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return all(isinstance(size, int) for size in value.shape)
    return (
        all(map(_has_fixed_sizes, value)) if isinstance(value, (tuple, list)) else not isinstance(value, torch.SymInt)
    )


def _draws(node: Node) -> bool:
    """Return whether a node draws random numbers: to draw them again, it needs the state of the generator."""
    is_random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return is_random and not is_plain(node)


def _crossing(gm: GraphModule, steps: Sequence[Node], results: Iterable[object]) -> list[Node]:
    """Return the values that the backward reads and does not compute, in the order in which they are returned."""
    made = frozenset(steps)
    read = {source for node in steps for source in node.all_input_nodes}
    read |= {value for value in results if isinstance(value, Node)}
    found = [node for node in gm.graph.nodes if node in read and node not in made and node.op != "get_attr"]
    return sorted((node for node in found if not is_tangent(node)), key=kind_of_saved_value)


def _forward_nodes(gm: GraphModule, gradients: Collection[Node], results: Iterable[object]) -> list[Node]:
    """Return what the forward runs: what it returns is computed from, and what has an effect."""
    wanted = [value for value in results if isinstance(value, Node)]
    wanted += [
        node for node in gm.graph.nodes if node.op == "call_function" and node not in gradients and node.is_impure()
    ]
    needed = sources_of(wanted)
    return [node for node in gm.graph.nodes if node in needed and node.op != "placeholder"]


def _constants(gm: GraphModule, steps: Sequence[Node]) -> list[Node]:
    """Return steps after the constants of the graph that they read."""
    read = {source for node in steps for source in node.all_input_nodes}
    return [*(node for node in gm.graph.nodes if node.op == "get_attr" and node in read), *steps]


def _extract(
    inputs: Sequence[Node], steps: Sequence[Node], results: Sequence[object], *, descs: Sequence[object]
) -> Graph:
    """Return a graph of copies of the nodes."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in steps:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in reversed(steps):
        if node.target is operator.getitem:  # a tuple's items are freed one by one
            copies[node.all_input_nodes[0]].append(copies[node])
    values: Any = tuple(copies[value] if isinstance(value, Node) else value for value in results)
    result = graph.output(values)
    result.meta["desc"] = list(descs)
    result.meta["output_stack_traces"] = [
        value.meta.get("stack_trace") if isinstance(value, Node) else None for value in values
    ]
    return graph
