"""Norms that are written out: code shared by the patterns of RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.symbolic_sizes import same_size

from .likeness import Likeness
from .matching import before_widening, call_of, either_way, is_call, is_last_dim, number_of, only_user, value_of
from .spec import Match, NearMiss


def is_root(node: Node) -> bool:
    """Return whether a node is the root, or the reciprocal root, of a sum."""
    call = call_of(node) if is_call(node, "rsqrt", "sqrt", "pow") else None
    return call is not None and call.arguments.get("exponent", -0.5) == -0.5 and is_call(call.input, "add")


SQUARES = (
    Likeness.of(lambda x, power, dim, keepdim, eps: x.pow(power).mean(dim, keepdim) + eps, anchor="add"),
    Likeness.of(lambda x, dim, keepdim, eps: (x * x).mean(dim, keepdim) + eps, anchor="add"),
)
"""Patterns of the mean of squares, or of another `power`, plus an epsilon."""
_BY_INVERSE = (Likeness.of(lambda x, root: x * root, anchor="root"),)
_BY_ROOT = (
    Likeness.of(lambda x, root: x / root, anchor="root"),
    Likeness.of(lambda x, root, one: x * (one / root), anchor="root"),
    Likeness.of(lambda x, root: x * torch.reciprocal(root), anchor="root"),
)


def quotients(root: Node) -> Iterator[tuple[Any, Node]]:
    """Yield each value that is divided by a root, with the quotient. The node is the root, or one over it."""
    for spelling in _BY_ROOT if is_call(root, "sqrt") else _BY_INVERSE:
        for found in spelling.find(root):
            if number_of(found.arguments.get("one", 1)) == 1:
                yield found["x"], found.end


def why_not_statistics(x: Node, *, what: str, dim: object, keepdim: object, eps: object) -> str | None:
    """Return why a kernel's statistics of rows are not those of a graph, or None; `what` is "mean" or "variance"."""
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


def why_not_called_so(x: object, shape: Any, eps: object) -> str | None:
    """Return why a kernel cannot compute torch's norm; None if it can. `eps` is None if torch's is a number."""
    if value_of(x) is None:
        return "nothing is known of its input"
    if len(shape) != 1:
        return f"it is over the last {len(shape)} dimensions"
    return None if eps is None or number_of(eps) is not None else f"its epsilon is {eps}, not a number"


def with_vector(node: Node, kind: str) -> tuple[Node, Node] | None:
    """Return a vector of a row's size, and the call of `kind` that combines the two and alone reads `node`."""
    user, value = only_user(node), value_of(node)
    call = call_of(user)
    if call is None or call.kind != kind or value is None or value.ndim == 0:
        return None
    for mine, vector in either_way(call):
        found = value_of(vector)
        if mine is node and vector is not node and found is not None and found.ndim == 1:
            return (vector, user) if same_size(found.shape[0], value.shape[-1]) else None
    return None


def of_sum(norm: Match | NearMiss | None) -> Match | NearMiss | None:
    """Return the match of a norm that adds a residual first; None if there is no norm, or its input is not a sum.

    Args:
        norm: The match of the norm itself; the first of its inputs is normalised.

    Returns:
        The same norm with the two terms in place of the sum, which becomes the second result.
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
