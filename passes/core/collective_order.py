"""The order of a graph's collectives, as text that is equal on all ranks."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.passes.ir.coalesced import inputs_of, results_of
from dsgraph.passes.ir.collectives import collective_group, collective_of, collectives, is_collective
from dsgraph.passes.ir.op_traits import traits

from .context import PassContext
from .notes import origin

_REACH = 64  # nodes looked at on the way from a collective to a gradient


def collective_lines(gm: GraphModule, ctx: PassContext) -> list[str]:
    """Return a line for each collective of a lowered graph: op, axis, shape, dtype and parameter.

    Two collectives of one shape that are swapped would run without an error: hence the parameter, if it is known.
    """
    names = {axis.group: axis.name for axis in ctx.axes}
    (output,) = gm.graph.find_nodes(op="output")
    values = output.args[0] if isinstance(output.args[0], (list, tuple)) else output.args
    gradients = {value: ctx.gradients[n] for n, value in enumerate(values) if n in ctx.gradients}
    lines = []
    for node in collectives(gm):
        value, group = node.meta.get("val"), collective_group(node)
        values = value if isinstance(value, (list, tuple)) else [value]
        shapes = ", ".join(shape_on_all_ranks(node, one) for one in values if isinstance(one, Tensor))
        whose = " and".join(filter(None, (_whose(result, gradients, ctx) for result in results_of(node))))
        lines.append(f"{node.target} {shapes} over {name_on_all_ranks(group, names)}{whose}")
    return lines


def name_on_all_ranks(group: str, names: dict[str, str]) -> str:
    """Return a name of a process group that is equal on every rank that runs the same graph.

    Ranks of one mesh may belong to different groups outside it, as in a model that its own code has made
    tensor-parallel: such groups are numbered as they appear.

    Args:
        group: Its name in torch.
        names: Names of the groups so far; the new one is added.
    """
    return names.setdefault(group, f"another group, number {len(names)}")


def shape_on_all_ranks(node: Node, value: Tensor) -> str:
    """Return shape and dtype of a tensor of a collective, without a number of rows that each rank chooses."""
    found, sizes = collective_of(node), [str(size) for size in value.shape]
    if found is not None and found.rows_vary:
        sizes[:1] = ["*"]
    return f"[{', '.join(sizes)}] {value.dtype}"


def describe_order(gm: GraphModule, ctx: PassContext) -> str:
    """Return the number of collectives of a lowered graph, and a digest of their order."""
    lines = collective_lines(gm, ctx)
    digest = hashlib.sha256("\0".join(lines).encode()).hexdigest()[:12]
    return f"{len(lines)} collectives in the order {digest}"


def _whose(node: Node, gradients: dict[Any, str], ctx: PassContext) -> str:
    source = origin(next(iter(inputs_of(node)), node))
    if source.name in ctx.params:
        return f" of {ctx.params[source.name].name}"
    reached, frontier = {node}, [node]
    for node in frontier:
        for user in node.users:
            if user in gradients:
                return f" for the gradient of {gradients[user]}"
            # Through further collectives as well: hybrid sharding reduces over one axis after the other.
            carries = is_collective(user) or traits(user).carries_sums
            if carries and user not in reached and len(frontier) < _REACH:
                reached.add(user)
                frontier.append(user)
    return ""
