"""Proofs about a mask, from the calls of a captured graph that make it.

Nothing is proved about tensors that the graph writes to: `bias = zeros(...); bias[mask] = -inf` is not finite.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.compat import share_memory
from dsgraph.inductor_ext.symbolic_sizes import same_size

from .matching import Call, call_of, dtype_of, number_of, value_of, writes

# An added or filled-in score of this size or more leaves nothing of the score itself in bfloat16, float32 or float64.
OVERWHELMING = 1e30


def is_causal(mask: object, *, keeps: bool) -> bool:
    """Return whether a boolean mask is causal: query i and keys 0 to i.

    Args:
        mask: A node; its last two dimensions are those of the queries and of the keys.
        keeps: True if the mask is True for visible keys, False if for hidden ones.
    """
    return triangle_of(mask) is keeps


def is_causal_bias(bias: object) -> bool:
    """Return whether adding `bias` is a causal mask: query i keeps the scores of the keys 0 to i unchanged."""
    call = unwritten_call_of(bias)
    if call is None:
        return False
    if call.kind == "triu" and call["diagonal"] == 1:
        return overwhelms(call.input)
    if call.kind == "masked_fill" and constant_of(call.input) == 0 and overwhelms(call["value"]):
        return is_causal(call["mask"], keeps=False)
    if call.kind == "where" and constant_of(call["input"]) == 0 and overwhelms(call["other"]):
        return is_causal(call["condition"], keeps=True)
    return _is_view(bias, call) and is_causal_bias(call.input)


# How many calls deep a mask is read: each may be computed from two masks.
_MOST_STEPS = 16


def is_finite(node: object, steps: int = _MOST_STEPS) -> bool:
    """Return whether a tensor or a number is proved to contain no infinity and no NaN, by at most `steps` calls."""
    number = constant_of(node)
    if number is not None:
        return math.isfinite(number)
    call = unwritten_call_of(node)
    if call is None or steps == 0:
        return False
    if call.kind == "masked_fill":
        return is_finite(call.input, steps - 1) and is_finite(call["value"], steps - 1)
    if call.kind == "where":
        return is_finite(call["input"], steps - 1) and is_finite(call["other"], steps - 1)
    if call.kind == "cast":
        return dtype_of(call.input) == torch.bool or (_widens(node, call) and is_finite(call.input, steps - 1))
    return call.kind in ("tril", "triu", *_MOVES) and is_finite(call.input, steps - 1)


_MOVES = ("contiguous", "reshape", "transpose", "getitem", "expand")


def leaves_each_row_a_score(node: object, *, keeps: bool | None = None) -> bool:
    """Return whether it is proved that query i keeps the score of key i.

    Args:
        node: A mask or a bias; its last two dimensions are queries and keys, equally many.
        keeps: For a mask, True if it is True for visible keys, False if for hidden ones. None for a bias, which keeps a
            score where it is small.
    """
    call = unwritten_call_of(node)
    if call is None:
        return False
    if keeps is not None:
        if not keeps and call.kind == "not" and dtype_of(node) == torch.bool:
            return leaves_each_row_a_score(call.input, keeps=True)
        return is_causal(node, keeps=keeps) or (keeps and _is_true_on_the_diagonal(node))
    if call.kind == "masked_fill":
        return is_small(call.input) and leaves_each_row_a_score(call["mask"], keeps=False)
    if call.kind == "where":
        return is_small(call["input"]) and leaves_each_row_a_score(call["condition"], keeps=True)
    return _is_view(node, call) and leaves_each_row_a_score(call.input)


def is_small(node: object) -> bool:
    """Return whether it is proved that adding this to a score does not hide it."""
    number = constant_of(node)
    return number is not None and abs(number) <= _SMALL


_SMALL = 1e3


def _is_true_everywhere(node: object) -> bool:
    """Return True for a mask of ones, and for `place >= 0` where places count from 0, which is no mask either."""
    if constant_of(node) == 1:
        return True
    call = unwritten_call_of(node)
    if call is None:
        return False
    if call.kind != "ge":
        return call.kind in _MOVES and _is_true_everywhere(call.input)
    axis, least = axis_of(call["input"]), number_of(call["other"])
    if axis is None or least is None:
        return False
    arguments, _, offset = axis[1]
    return len(arguments) == 1 and least <= offset


def _is_true_on_the_diagonal(node: object, steps: int = _MOST_STEPS) -> bool:
    if _is_true_everywhere(node) or triangle_of(node) is True:
        return True
    call = unwritten_call_of(node)
    if call is None or steps == 0:
        return False
    if call.kind in ("and", "or"):
        sides = (_is_true_on_the_diagonal(call[side], steps - 1) for side in ("input", "other"))
        return all(sides) if call.kind == "and" else any(sides)
    if call.kind in ("eq", "le", "ge"):  # nan is not equal to itself
        dtype = dtype_of(call["input"])
        return (
            dtype is not None and not dtype.is_floating_point and _is_same_on_the_diagonal(call["input"], call["other"])
        )
    is_moved = _is_view(node, call) or (call.kind == "cast" and dtype_of(node) == torch.bool)
    return is_moved and _is_true_on_the_diagonal(call.input, steps - 1)


def _is_same_on_the_diagonal(one: object, other: object) -> bool:
    """Return whether two tensors are equal where the last two indices are: `x[i]` and `x[j]`, or i and j themselves."""
    if not isinstance(one, Node) or not isinstance(other, Node):
        return False
    axes = axis_of(one), axis_of(other)
    if axes[0] is not None and axes[1] is not None:
        return axes[0][1] == axes[1][1] and {axes[0][0], axes[1][0]} <= {1, 2}
    calls = unwritten_call_of(one), unwritten_call_of(other)
    if calls[0] is None or calls[1] is None or not calls[0].kind == calls[1].kind == "getitem":
        return False
    first, second = calls[0]["index"], calls[1]["index"]
    if calls[0].input is not calls[1].input or not isinstance(first, tuple) or not isinstance(second, tuple):
        return False
    return len(first) == len(second) and all(
        isinstance(x, Node) and (x is y or _is_same_on_the_diagonal(x, y)) for x, y in zip(first, second, strict=True)
    )


def axis_of(node: Node) -> tuple[int, tuple[tuple[object, ...], object, float]] | None:
    """Return the dimension along which a tensor holds the numbers of a range, from the last as 1, and the range.

    The range is given by the arguments of `arange` and the number that is added to it.
    """
    call = unwritten_call_of(node)
    if call is None or call.kind != "getitem" or not isinstance(call["index"], tuple):
        return None
    places = [place for place, item in enumerate(call["index"]) if item is not None]
    if len(places) > 1 or any(call["index"][place] != slice(None) for place in places):
        return None
    numbers, offset = call.input, 0.0
    while (inner := unwritten_call_of(numbers)) is not None and inner.kind == "add" and inner["alpha"] == 1:
        more = number_of(inner["other"])
        if more is None:
            return None
        numbers, offset = inner.input, offset + more
    if not isinstance(numbers, Node) or numbers.target is not torch.arange or is_written(numbers):
        return None
    return len(call["index"]) - places[0] if places else 1, (numbers.args, dict(numbers.kwargs), offset)


def unwritten_call_of(node: object) -> Call | None:
    """Return `call_of`, but None for tensors that the graph writes to later."""
    return None if isinstance(node, Node) and is_written(node) else call_of(node)


def is_written(node: Node) -> bool:
    """Return whether a graph writes to a node's result, or to a view of it."""
    value, seen = value_of(node), {node}
    frontier = [node]
    while frontier:
        for user in frontier.pop().users:
            if writes(user):
                return True
            made = value_of(user)
            if user not in seen and made is not None and value is not None and share_memory(made, value):
                seen.add(user)
                frontier.append(user)
    return False


def constant_of(node: object) -> float | None:
    """Return the number that an argument is, or that fills a tensor; None if unknown."""
    if not isinstance(node, Node):
        return number_of(node)
    if is_written(node):
        return None
    if node.target in _CONSTANTS:
        return _CONSTANTS[node.target]
    place = _FILLED.get(node.target)
    if place is not None:
        return number_of(node.args[place] if len(node.args) > place else node.kwargs.get("fill_value"))
    call = unwritten_call_of(node)
    if call is not None and (call.kind in _MOVES or (call.kind == "cast" and _widens(node, call))):
        return constant_of(call.input)
    return None


_CONSTANTS: dict[Any, float] = {torch.ones: 1.0, torch.ones_like: 1.0, "new_ones": 1.0}
_CONSTANTS |= {torch.zeros: 0.0, torch.zeros_like: 0.0, "new_zeros": 0.0}
# The place of the number.
_FILLED: dict[Any, int] = {torch.full: 1, torch.full_like: 1, "new_full": 2}


def overwhelms(node: object) -> bool:
    """Return whether a number, or a tensor filled with it, hides every score to which it is added."""
    number = constant_of(node)
    return number is not None and number <= -OVERWHELMING


def triangle_of(mask: object) -> bool | None:
    """Return True for a lower triangle of ones with the diagonal, False for ones above it, None for everything else."""
    call = unwritten_call_of(mask)
    if call is None:
        return None
    if call.kind in ("tril", "triu"):
        lower = call.kind == "tril"
        is_split = call["diagonal"] == (0 if lower else 1)
        return lower if is_split and constant_of(call.input) == 1 else None
    inner = triangle_of(call.input)
    if inner is None:
        return None
    if call.kind in ("eq", "ne"):
        number = number_of(call["other"])
        if number not in (0, 1):
            return None
        return inner if (call.kind == "eq") == (number == 1) else not inner
    if call.kind == "not":
        return not inner if dtype_of(call.input) == torch.bool else None
    return inner if call.kind == "cast" or _is_view(mask, call) else None


def _is_view(node: object, call: Call) -> bool:
    """Return whether a call only adds leading dimensions, or cuts off ends."""
    if call.kind in ("contiguous", "reshape", "expand"):
        before, after = value_of(call.input), value_of(node)
        if before is None or after is None or before.ndim < 2 or after.ndim < 2:
            return False
        return all(map(same_size, before.shape[-2:], after.shape[-2:]))
    if call.kind == "cast":
        return _widens(node, call)
    if call.kind == "getitem":
        index = list(call["index"]) if isinstance(call["index"], tuple) else [call["index"]]
        while index and index[0] is None:
            index.pop(0)
        return all(item is Ellipsis or _is_beginning(item) for item in index)
    return False


def _is_beginning(item: object) -> bool:
    return isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1)


def _widens(node: object, call: Call) -> bool:
    """Return whether a cast loses no precision."""
    before, after = dtype_of(call.input), dtype_of(node)
    return before is not None and after is not None and torch.promote_types(before, after) == after
