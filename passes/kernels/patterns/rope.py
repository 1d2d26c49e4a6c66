"""Rotary positions as models spell them: by a rotated copy, as transformers does, or half by half.

x * cos + cat((-x2, x1), -1) * sin                                       # the anchor is what joins the halves
cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
the same with x[..., ::2], x[..., 1::2] for x1, x2 and stack(..., -1).flatten(-2) for cat
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import Node

from dsgraph.inductor_ext.kernels import rope as kernel
from dsgraph.inductor_ext.symbolic_sizes import same_shape, same_size
from dsgraph.passes.kernels.likeness import Likeness, Occurrence, Reading
from dsgraph.passes.kernels.matching import (
    Call,
    before_widening,
    call_of,
    dtype_of,
    is_last_dim,
    only_user,
    value_of,
    with_narrowing,
)
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel

_WAYS = {False: "halves", True: "neighbours"}


@Reading
def _half(node: Any) -> Iterator[tuple[Node, int, bool]]:
    """Read `_half(x, number, in_pairs)`: the first or the second half of the columns, or every other column."""
    call, made = call_of(node), value_of(node)
    if call is None or call.kind != "getitem" or made is None:
        return
    pieces, index = call_of(call.input), call["index"]
    x = pieces.input if pieces is not None and pieces.kind in ("chunk", "split") else call.input
    value = value_of(x)
    if value is None or made.ndim != value.ndim or not all(map(same_size, made.shape[:-1], value.shape[:-1])):
        return
    n = value.shape[-1]
    if not isinstance(n, int) or n % 2:
        return
    taken = _columns(index, n) if pieces is None or x is call.input else _piece(pieces, index, value)
    for in_pairs, those in ((False, (range(n // 2), range(n // 2, n))), (True, (range(0, n, 2), range(1, n, 2)))):
        if taken in those:
            yield x, those.index(taken), in_pairs


def _columns(index: Any, n: int) -> Any:
    """Return the columns, of n, that an index of the last dimension takes."""
    last = index[-1] if isinstance(index, tuple) else index
    ends = (last.start, last.stop, last.step) if isinstance(last, slice) else (...,)
    return range(n)[last] if all(end is None or isinstance(end, int) for end in ends) else None


def _piece(pieces: Call, index: int, value: Tensor) -> range | None:
    """Return the columns of a piece into which a tensor was cut; those of one half if it is one of two halves."""
    if not is_last_dim(pieces["dim"], value):
        return None
    n = value.shape[-1]
    size = pieces["size"] if pieces.kind == "split" else -(-n // pieces["chunks"])
    sizes = list(size) if isinstance(size, (list, tuple)) else [size] * 2
    return (range(n // 2), range(n // 2, n))[index] if sizes == [n // 2] * 2 else None


@Reading
def _join(node: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Read `_join(first, second, in_pairs)`: two tensors concatenated, or interleaved column by column."""
    call, value = call_of(node), value_of(node)
    if call is None or value is None:
        return
    if call.kind == "cat" and len(call["tensors"]) == 2 and is_last_dim(call["dim"], value):
        yield (*call["tensors"], False)
    stack, source = call_of(call.input), value_of(call.input)
    if call.kind != "reshape" or stack is None or stack.kind != "stack" or source is None:
        return
    is_flat = value.ndim == source.ndim - 1 and all(map(same_size, value.shape[:-1], source.shape[:-2]))
    if len(stack["tensors"]) == 2 and is_last_dim(stack["dim"], source) and is_flat and only_user(call.input) is node:
        yield (*stack["tensors"], True)


@Reading
def _sum(node: Any) -> Iterator[tuple[tuple[Any, int], tuple[Any, int]]]:
    """Read `_sum(one, other)`: a sum or difference, in both orders; its terms are nodes and signs."""
    call = call_of(node)
    if call is not None and call.kind in ("add", "sub") and call["alpha"] == 1:
        one, other = (call.input, 1), (call["other"], 1 if call.kind == "add" else -1)
        yield one, other
        yield other, one


@Reading
def _product(term: tuple[Any, int]) -> Iterator[tuple[Any, tuple[Any, int]]]:
    """Read `_product(factor, table)`: a term of a sum as a product, in both orders; the table is a node and a sign."""
    node, sign = _without_neg(*term)
    call = call_of(node)
    if call is not None and call.kind == "mul":
        one, sign = _without_neg(call.input, sign)
        other, sign = _without_neg(call["other"], sign)
        yield one, (other, sign)
        yield other, (one, sign)


def _without_neg(node: Any, sign: int) -> tuple[Any, int]:
    call = call_of(node)
    return (call.input, -sign) if call is not None and call.kind == "neg" else (node, sign)


def _by_halves(x: Any, cos: Any, sin: Any, cos_2: Any, sin_2: Any, apart: Any, joined: Any) -> Any:
    first = _sum(_product(_half(x, 0, apart), cos), _product(_half(x, 1, apart), sin))
    second = _sum(_product(_half(x, 0, apart), sin_2), _product(_half(x, 1, apart), cos_2))
    return _join(first, second, joined)


_TURNS = {
    False: Likeness.of(lambda x, apart, joined: _join(-_half(x, 1, apart), _half(x, 0, apart), joined), anchor="_join"),
    True: Likeness.of(lambda x, apart, joined: _join(_half(x, 1, apart), -_half(x, 0, apart), joined), anchor="_join"),
}
_ROTATIONS = {
    False: Likeness.of(lambda x, cos, turned, sin: x * cos + turned * sin, anchor="turned"),
    True: Likeness.of(lambda x, cos, turned, sin: x * cos - turned * sin, anchor="turned"),
}
_BY_HALVES = Likeness.of(_by_halves, anchor="_join")
is_anchor = _BY_HALVES.is_anchor


def match(node: Node) -> Match | NearMiss | None:
    """Match the rotation whose halves `node` joins."""
    for turns_back, turn in _TURNS.items():
        for found in turn.find(node):
            return _why_not_joined(found) or _match_turned(found, turns_back=turns_back)
    for found in _BY_HALVES.find(node):
        return _why_not_joined(found) or _match_halves(found)
    return None


def _why_not_joined(found: Occurrence) -> NearMiss | None:
    apart, joined = (_WAYS[found[name]] for name in ("apart", "joined"))
    if apart == joined:
        return None
    return NearMiss(found.end, f"it takes its input apart by {apart} and puts it together by {joined}")


def _match_turned(turned: Occurrence, *, turns_back: bool) -> Match | NearMiss | None:
    """Match `x * cos + turned * sin`."""
    other = None
    for is_less, rotation in _ROTATIONS.items():
        for found in rotation.find(turned.end):
            if found["x"] is turned["x"]:
                return _match(found.end, turned, (found["cos"], found["sin"]), inverse=is_less ^ turns_back)
            other = other or found.end
    return NearMiss(other, "what is turned is not what is multiplied by the cosine") if other is not None else None


def _match_halves(found: Occurrence) -> Match | NearMiss:
    """Match `x1 * cos - x2 * sin` and `x2 * cos + x1 * sin`."""
    tables, signs = zip(*(found[name] for name in ("cos", "sin", "cos_2", "sin_2")), strict=True)
    if tables[0] is not tables[2] or tables[1] is not tables[3]:
        return NearMiss(found.end, "its halves are not multiplied by the same cosine and sine")
    if signs not in ((1, -1, 1, 1), (1, 1, 1, -1)):
        return NearMiss(found.end, "its signs are not those of a rotation")
    return _match(found.end, found, tables[:2], inverse=signs[1] == 1, columns_per_table=2)


def _match(
    end: Node, found: Occurrence, tables: tuple[Any, ...], *, inverse: bool, columns_per_table: int = 1
) -> Match | NearMiss:
    made, x, cos, sin = map(value_of, (end, found["x"], *tables))
    if made is None or x is None or cos is None or sin is None:
        return NearMiss(end, "nothing is known of its tables")
    if not same_shape(x, made):
        return NearMiss(end, f"its tables make {list(made.shape)} of its input {list(x.shape)}")
    columns = x.shape[-1] // columns_per_table
    for table in (cos, sin):
        count = table.shape[-1] if table.ndim else 1
        if not same_size(count, columns):
            return NearMiss(end, f"its tables have {count} columns, where {columns} were expected")
    end = with_narrowing(end)
    options = {"interleaved": found["joined"], "inverse": inverse, "dtype": dtype_of(end)}
    return Match(end, tuple(map(before_widening, (found["x"], *tables))), options)


SPEC = traced_kernel(
    "rope",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=gain_by_fusing(forward=5, backward=9),
    triton=(kernel.rotate_kernel,),
    traced=(kernel.traceable, kernel.backward_traceable),
)
