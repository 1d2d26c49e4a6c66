"""Reading gates, `activation(gate) * up`: what the patterns of the gated kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from dsgraph.inductor_ext.sizes import same_shape

from .matching import before_widening, call_of, dtype_of, either_way, is_call, only_user, value_of, with_narrowing
from .spec import Match, NearMiss


def products_of(node: Node) -> Iterator[tuple[Node, Any]]:
    """The products that a node is a factor of, each with the other factor."""
    for user in node.users:
        call = call_of(user)
        if call is not None and call.kind == "mul":
            for mine, other in either_way(call):
                if mine is node:
                    yield user, other
                    break


def gated(
    activated: Node, gate: Node, *, up: Any = None, end: Node | None = None, **options: Any
) -> Match | NearMiss | None:
    """The product of an activated gate with as large a tensor.

    Args:
        activated: The activation's result. It may be cast before it is multiplied.
        gate: What is activated.
        up: What it is multiplied by, where that is known already.
        end: The product, likewise.
        options: Of the kernel, besides `dtype`.

    Returns:
        None where it is multiplied by no tensor: then it is not a gate.
    """
    if end is None:
        cast = only_user(activated)
        products = [*products_of(activated), *(products_of(cast) if is_call(cast, "cast") else ())]
        found = next(((node, other) for node, other in products if value_of(other) is not None), None)
        if found is None:
            return None
        end, up = found
    ours, theirs = value_of(gate), value_of(up)
    if ours is None or theirs is None:
        return None
    if not same_shape(ours, theirs):
        return NearMiss(end, f"its gate is {_shape(ours)} and its other half {_shape(theirs)}")
    end = with_narrowing(end)
    return Match(end, (before_widening(gate), before_widening(up)), {"dtype": dtype_of(end), **options})


def _shape(value: Any) -> str:
    return str(list(value.shape))
