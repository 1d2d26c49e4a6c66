"""Helpers for the notes of passes: names that a user knows."""

from __future__ import annotations

from torch.fx import Node

from dsgraph.passes.ir.coalesced import inputs_of, results_of
from dsgraph.passes.ir.collectives import is_collective
from dsgraph.passes.ir.graph import fake_value
from dsgraph.passes.ir.parameters import ParameterSpec
from dsgraph.passes.ir.user_source import user_source

from .context import PassContext


def user_line(node: Node) -> str:
    """Return ` (file.py:12)`, the user's innermost line that a node comes from; empty if unknown."""
    place, _ = user_source(node.meta.get("stack_trace"))
    return f" ({place.rpartition('/')[2]})" if place else ""


def parameter_behind(node: Node, ctx: PassContext) -> ParameterSpec | None:
    """Return the only parameter that a node is computed from; None if there is none, or more than that."""
    return ctx.params.get(origin(node).name)


def parameter_of(node: Node, ctx: PassContext) -> str:
    """Return the name of the parameter that a node is computed from, otherwise the node's name.

    For a coalesced collective, return all parameters.
    """
    made_of = [item for result in results_of(node) for item in inputs_of(result)] if is_collective(node) else [node]
    found = [parameter_behind(item, ctx) for item in made_of]
    names = [info.name for info in found if info is not None]
    if not names or len(names) < len(found):
        return node.name
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(names)}"


def origin(node: Node) -> Node:
    """Return the origin of a node, following nodes with one argument; for a result of a bucket, its own argument."""
    while node.op != "placeholder" and len(inputs_of(node)) == 1:
        (node,) = inputs_of(node)
    return node


def described(node: Node) -> str:
    """Describe a node by name, shape and dtype: `reduce_grad_3 [64, 32] float32`."""
    value = fake_value(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    kinds = [f"{list(item.shape)} {str(item.dtype).removeprefix('torch.')}" for item in values]
    return f"{node.name} {', '.join(kinds)}"
