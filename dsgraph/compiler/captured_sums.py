"""Accumulated gradients that a captured graph reduces together with its own: those that only its markers read.

While a step waits for its last backward, captured markers carry the accumulated gradient of their parameter
(`seam.property_for`), and do nothing with it: a compiler other than this backend would not report when it was added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.compat import is_to_local
from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker, placeholders

CHECKPOINT_REGION = torch.ops.higher_order.tag_activation_checkpoint


def add_sums(gm: GraphModule, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Let the markers of a captured graph add the sums that they read.

    If such a graph computes a gradient of a parameter, the gradient contains the sum. Therefore a marker adds it only
    if nothing else reads its parameter, and if it is in the graph itself or in a checkpoint region, which run for all
    data.

    Args:
        gm: The captured graph, as Dynamo wrote it.
        inputs: Its inputs.

    Returns:
        Which inputs are the sums.
    """
    adding: set[Node] = set()
    parameters: set[int] = set()
    for node, value in zip(placeholders(gm), inputs, strict=True):
        markers = _readers(node)
        if markers and all(map(_reads_sum, markers)):
            adding.update(markers)
            parameters.add(id(value))
    for module in all_graph_modules(gm):
        for node in filter(is_gather_marker, module.graph.nodes):
            if node in adding:
                node.kwargs = {**node.kwargs, "adds_sum": True}
        module.recompile()
    sums = ((number, getattr(value, "dsgraph_sum_of", None)) for number, value in enumerate(inputs))
    return tuple(number for number, of in sums if of is not None and id(of[0].param) in parameters)


def _readers(parameter: Node) -> list[Node]:
    """Return the markers that read a parameter; none if anything else reads it, or might."""
    found: list[Node] = []
    for user in parameter.users:
        if is_to_local(user):
            markers = list(user.users)
        elif user.target is CHECKPOINT_REGION:
            markers = [marker for inner in _in_region(user, parameter) for marker in _readers(inner) or [user]]
        else:
            return []
        if not all(map(is_gather_marker, markers)):
            return []
        found += markers
    return found


def _in_region(call: Node, operand: Node) -> Iterator[Node]:
    """Yield the nodes of a checkpoint region that represent one of its operands."""
    body, *operands = call.args
    assert isinstance(body, Node) and call.graph.owning_module is not None
    region = call.graph.owning_module.get_submodule(str(body.target))
    assert isinstance(region, GraphModule)
    for argument, inner in zip(operands, placeholders(region), strict=True):
        if argument is operand:
            yield inner


def _reads_sum(marker: Node) -> bool:
    return len(marker.args) > 3 and marker.args[3] is not None
