"""What the notes of passes share: names that a user knows."""

from __future__ import annotations

from torch.fx import Node

from .base import ParamInfo, PassContext
from .graph import fake_value


def parameter_behind(node: Node, ctx: PassContext) -> ParamInfo | None:
    """The parameter that a node is made of, and of nothing else; None where there is no such parameter."""
    source = node
    while source.op != "placeholder" and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    return ctx.params.get(source.name)


def parameter_of(node: Node, ctx: PassContext) -> str:
    """The parameter that a node is made of, by its name in the model; else the node itself, by its name."""
    known = parameter_behind(node, ctx)
    return f"parameter {known.name}" if known is not None else node.name


def described(node: Node) -> str:
    """A node by name, shape and dtype: `reduce_grad_3 [64, 32] float32`."""
    value = fake_value(node)
    return f"{node.name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
