"""The terms of a boolean mask: causality, and masks of single keys.

transformers writes a mask as `causal & padding`, expanded to all queries and keys. If the terms are known, a kernel
that skips blocks needs no mask of all scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from dsgraph.inductor_ext.symbolic_sizes import same_size

from .masks import axis_of, constant_of, is_written, overwhelms, triangle_of, unwritten_call_of
from .matching import Call, call_of, dtype_of, number_of, value_of

# How many calls deep a mask is read.
_MOST_STEPS = 32


@dataclass
class MaskTerms:
    """A mask as `and` of its terms.

    Attributes:
        causal: True if one of them is causal: query i sees the keys 0 to i.
        terms: The others, boolean nodes that are broadcast over the scores.
    """

    causal: bool = False
    terms: list[Node] = field(default_factory=list)


def terms_of(mask: Node) -> MaskTerms:
    """Return the terms of a mask that is True for visible keys; the mask itself if they are unknown."""
    found = MaskTerms()
    _add(mask, found, _MOST_STEPS)
    if any(is_written(term) for term in found.terms):
        return MaskTerms(terms=[mask])
    return found


def mask_of_bias(bias: Node) -> tuple[Node, bool] | None:
    """Return the mask that a bias of 0 and hugely negative numbers means, and if it is True for visible keys."""
    call = unwritten_call_of(bias)
    if call is None:
        return None
    if call.kind == "where" and isinstance(call["condition"], Node):
        if constant_of(call["input"]) == 0 and overwhelms(call["other"]):
            return call["condition"], True
        return (call["condition"], False) if constant_of(call["other"]) == 0 and overwhelms(call["input"]) else None
    if call.kind == "masked_fill" and isinstance(call["mask"], Node):
        return (call["mask"], False) if constant_of(call.input) == 0 and overwhelms(call["value"]) else None
    if call.kind in ("cast", "expand", "contiguous") and isinstance(call.input, Node) and _same_dims(bias, call.input):
        return mask_of_bias(call.input)
    return None


def _add(mask: Node, found: MaskTerms, steps: int) -> None:
    call = unwritten_call_of(mask)
    if constant_of(mask) == 1:
        return
    if triangle_of(mask) is True or (call is not None and _is_causal(call)):
        found.causal = True
        return
    if call is None or steps == 0 or dtype_of(mask) != torch.bool or _holds_always(call):
        if call is None or steps == 0 or not _holds_always(call):
            found.terms.append(mask)
        return
    inner = call.input
    if call.kind == "and" and isinstance(inner, Node) and isinstance(call["other"], Node):
        _add(inner, found, steps - 1)
        _add(call["other"], found, steps - 1)
    elif (
        call.kind in ("cast", "expand", "contiguous")
        and isinstance(inner, Node)
        and dtype_of(inner) == torch.bool
        and _same_dims(mask, inner)
    ):
        _add(inner, found, steps - 1)
    else:
        found.terms.append(mask)


def _same_dims(one: Node, other: Node) -> bool:
    first, second = value_of(one), value_of(other)
    return first is not None and second is not None and first.ndim == second.ndim


def _is_causal(call: Call) -> bool:
    """Return whether it is `key <= query` or `query >= key` of positions."""
    if call.kind not in ("le", "ge"):
        return False
    smaller, larger = (call["input"], call["other"]) if call.kind == "le" else (call["other"], call["input"])
    first, second = _place(smaller), _place(larger)
    return first is not None and second is not None and first[0] == 1 and second[0] == 2 and first[1] == second[1]


def _holds_always(call: Call) -> bool:
    """Return whether it is always true: `position >= 0`, or a comparison of sequences if there is only one."""
    if call.kind == "ge":
        place, least = _place(call["input"]), number_of(call["other"])
        return place is not None and least is not None and least <= place[1][-1] and len(place[1][0]) == 1
    if call.kind != "eq":
        return False
    first, second = unwritten_call_of(call["input"]), unwritten_call_of(call["other"])
    if first is None or second is None or not first.kind == second.kind == "getitem":
        return False
    return first.input is second.input and _is_one_sequence(first.input)


def _place(node: object) -> tuple[int, tuple[tuple[object, ...], object, float]] | None:
    """Return the dimension, from the last as 1, along which a tensor holds the numbers of a range, and the range."""
    if not isinstance(node, Node):
        return None
    plain = axis_of(node)
    if plain is not None:
        return plain
    call = unwritten_call_of(node)
    if call is None or call.kind != "getitem" or not isinstance(call["index"], tuple) or not call["index"]:
        return None
    axis = axis_of(call["index"][-1]) if isinstance(call["index"][-1], Node) else None
    numbers = _range(call.input)
    if axis is None or numbers is None or axis[1][-1] != 0 or len(axis[1][0]) != 1:
        return None
    return axis[0], numbers


def _range(node: object) -> tuple[tuple[object, ...], object, float] | None:
    """Return the range that each row of a tensor holds."""
    offset = 0.0
    while isinstance(node, Node):
        if node.target is torch.arange:
            return None if is_written(node) else (node.args, dict(node.kwargs), offset)
        call, value = unwritten_call_of(node), value_of(node)
        before = value_of(call.input) if call is not None else None
        if call is None or value is None or before is None or not same_size(value.shape[-1], before.shape[-1]):
            return None
        if call.kind == "add" and call["alpha"] == 1 and (more := number_of(call["other"])) is not None:
            offset += more
        elif call.kind not in ("expand", "reshape") or before.numel() != before.shape[-1]:
            return None
        node = call.input
    return None


def _is_one_sequence(node: object) -> bool:
    """Return whether it counts the sequences in positions that are known to be contiguous."""
    if not isinstance(node, Node) or node.target != "cumsum" or is_written(node):
        return False
    call = unwritten_call_of(node.args[0])
    if call is None or call.kind != "ne" or number_of(call["other"]) != 1:
        return False
    steps = call["input"]
    if not isinstance(steps, Node) or steps.target is not torch.diff or is_written(steps) or len(steps.args) != 1:
        return False
    positions, before = steps.args[0], call_of(steps.kwargs.get("prepend"))
    if set(steps.kwargs) != {"prepend", "dim"} or steps.kwargs["dim"] != -1 or before is None or before.kind != "sub":
        return False
    first = call_of(before.input)
    begins = first is not None and first.kind == "getitem" and first.input is positions
    return begins and number_of(before["other"]) == 1 and _range(positions) is not None
