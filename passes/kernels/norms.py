"""Reading norms that are written out: what the patterns of RMSNorm and LayerNorm share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node

from .matching import Call, before_widening, call_of, either_way, is_call, is_last_dim, number_of, value_of
from .spec import Match, NearMiss


def is_root(node: Node) -> bool:
    """Whether a node is the root, or one over the root, of a sum."""
    call = call_of(node)
    if call is None:
        return False
    is_power = call.kind == "pow" and call["exponent"] == -0.5
    return (is_power or call.kind in ("rsqrt", "sqrt")) and is_call(call.input, "add")


def why_not_statistics(x: Node, *, what: str, dim: object, keepdim: object, eps: object) -> str | None:
    """Why a kernel's statistics of rows are not those of a graph, or None; `what` is "mean" or "variance"."""
    value = value_of(x)
    if value is None:
        return "nothing is known of its input"
    if not is_last_dim(dim, value):
        return f"its {what} is over dimension {dim}, not over the last"
    if keepdim is not True:
        return f"its {what} drops the dimension"
    if number_of(eps) is None:
        return f"its epsilon is {eps}, not a number"
    if value.dtype not in (torch.float32, torch.float64):
        return f"its statistics are in {value.dtype}; the kernel's are in float32, which gives other numbers"
    return None


def power_of(node: object) -> tuple[Node, object] | None:
    """Base and exponent of a power, `x * x` among them."""
    call = call_of(node)
    if call is None or not isinstance(call.input, Node):
        return None
    if call.kind == "pow":
        return call.input, call["exponent"]
    if call.kind == "square" or (call.kind == "mul" and call.input is call["other"]):
        return call.input, 2
    return None


def divided_by(root: Node, is_numerator: Callable[[object], bool]) -> Node | None:
    """`x * root`, `x / root` or `x * (1 / root)`, whichever the kind of root asks for."""
    if not is_call(root, "sqrt"):
        return _multiplied_by(root, is_numerator)
    for user in root.users:
        call = call_of(user)
        if call is None:
            continue
        if call.kind == "div" and call["rounding_mode"] is None and call["other"] is root:
            if is_numerator(call.input):
                return user
            if number_of(call.input) == 1:
                return _multiplied_by(user, is_numerator)
        if call.kind == "reciprocal":
            return _multiplied_by(user, is_numerator)
    return None


def _multiplied_by(inverse: Node, is_numerator: Callable[[object], bool]) -> Node | None:
    for user in inverse.users:
        call = call_of(user)
        if call is not None and call.kind == "mul" and _is_product(call, inverse, is_numerator):
            return user
    return None


def _is_product(call: Call, inverse: Node, is_numerator: Callable[[object], bool]) -> bool:
    return any(two is inverse and is_numerator(one) for one, two in either_way(call))


def of_sum(norm: Match | NearMiss | None) -> Match | NearMiss | None:
    """The match of a norm that adds a residual first; None where there is no norm, or its input is not a sum.

    Args:
        norm: What the pattern of the norm alone found; the first of its inputs is what is normalised.

    Returns:
        The same norm with the two that are added in place of the sum, which becomes the second result.
    """
    if not isinstance(norm, Match):
        return None  # the norm's own kernel says why
    total, *others = norm.inputs
    total = before_widening(total)
    call = call_of(total)
    if call is None or call.kind != "add" or value_of(call.input) is None or value_of(call["other"]) is None:
        return None
    if call["alpha"] != 1:
        return NearMiss(total, f"what is added is multiplied by {call['alpha']} first")
    return replace(norm, inputs=(call.input, call["other"], *others), others={1: total})
