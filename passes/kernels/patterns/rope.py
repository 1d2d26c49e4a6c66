"""Rotary positions as models spell them: by a rotated copy, as transformers does, or half by half.

x * cos + cat((-x2, x1), -1) * sin                                       # the anchor is what joins the halves
cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
the same with x[..., ::2], x[..., 1::2] for x1, x2 and stack(..., -1).flatten(-2) for cat
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from dsgraph.inductor_ext.kernels import rope as kernel
from dsgraph.inductor_ext.sizes import same_shape, same_size
from dsgraph.passes.kernels.matching import (
    before_widening,
    call_of,
    dtype_of,
    either_way,
    is_call,
    is_last_dim,
    only_user,
    value_of,
    with_narrowing,
)
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel

_OTHERWISE = "it takes its input apart by {} and puts it together by {}"
_WAYS = {False: "halves", True: "neighbours"}


def is_anchor(node: Node) -> bool:
    """What joins two tensors."""
    call = call_of(node)
    return call is not None and call.kind in ("cat", "stack") and len(call["tensors"]) == 2


def match(node: Node) -> Match | NearMiss | None:
    """Finds the rotation whose halves `node` joins."""
    joined = _joined(node)
    if joined is None:
        return None
    turn = _quarter_turn(joined)
    return _match_halves(joined) if turn is None else _match_turn(joined, *turn)


@dataclass(frozen=True)
class _Joined:
    """Two halves as one tensor `end`, `[..., n]`, one behind the other or column by column."""

    end: Node
    first: Any
    second: Any
    interleaved: bool


@dataclass(frozen=True)
class _Half:
    """Columns of x, `[..., n]`: those of one half or every other one, the first or second such."""

    x: Node
    number: int
    interleaved: bool


@dataclass(frozen=True)
class _Product:
    """`sign * half * table`."""

    half: _Half
    table: Node
    sign: int


def _joined(node: Node) -> _Joined | None:
    call, value = call_of(node), value_of(node)
    if call is None or value is None or not is_last_dim(call["dim"], value):
        return None
    first, second = call["tensors"]
    if call.kind == "cat":
        return _Joined(node, first, second, interleaved=False)
    flat = only_user(node)
    flattened = value_of(flat)
    if flattened is None or not is_call(flat, "reshape") or flattened.ndim != value.ndim - 1:
        return None
    if not all(map(same_size, flattened.shape[:-1], value.shape[:-2])):
        return None
    return _Joined(flat, first, second, interleaved=True)


def _half(node: object) -> _Half | None:
    call = call_of(node)
    if call is None or call.kind != "getitem":
        return None
    source, index = call["input"], call["index"]
    pieces = call_of(source)
    if pieces is not None and pieces.kind in ("chunk", "split"):
        value = value_of(pieces.input)
        if index in (0, 1) and value is not None and is_last_dim(pieces["dim"], value) and _is_in_two(pieces, value):
            return _Half(pieces.input, index, interleaved=False)
        return None
    value = value_of(source)
    if value is None or not isinstance(index, tuple) or not _is_of_last_dim(index, value.ndim):
        return None
    return _columns(source, index[-1], value.shape[-1])


def _is_in_two(pieces: Any, value: Any) -> bool:
    n = value.shape[-1]
    if not isinstance(n, int) or n % 2:
        return False
    if pieces.kind == "chunk":
        return bool(pieces["chunks"] == 2)
    size = pieces["size"]
    return size == n // 2 or (isinstance(size, (list, tuple)) and list(size) == [n // 2] * 2)


def _is_of_last_dim(index: tuple[Any, ...], ndim: int) -> bool:
    *others, last = index
    if not isinstance(last, slice):
        return False
    return others == [Ellipsis] or (len(index) == ndim and all(item == slice(None) for item in others))


def _columns(x: Node, columns: slice, n: object) -> _Half | None:
    ends = (columns.start, columns.stop, columns.step)
    if not isinstance(n, int) or n % 2 or not all(item is None or isinstance(item, int) for item in ends):
        return None
    taken = range(*columns.indices(n))
    halves = {(0, False): range(n // 2), (1, False): range(n // 2, n)}
    neighbours = {(0, True): range(0, n, 2), (1, True): range(1, n, 2)}
    for (number, interleaved), those in {**halves, **neighbours}.items():
        if taken == those:
            return _Half(x, number, interleaved)
    return None


def _quarter_turn(joined: _Joined) -> tuple[_Half, bool] | None:
    """A half of what is turned by 90 degrees, and whether backwards."""
    for negated, plain, inverse in ((joined.first, joined.second, False), (joined.second, joined.first, True)):
        call = call_of(negated)
        one, other = _half(call.input if call is not None and call.kind == "neg" else None), _half(plain)
        if one is None or other is None or one.x is not other.x or one.interleaved != other.interleaved:
            continue
        if (one.number, other.number) == ((0, 1) if inverse else (1, 0)):
            return one, inverse
    return None


def _match_turn(joined: _Joined, half: _Half, inverse: bool) -> Match | NearMiss | None:
    """`x * cos + turned * sin`."""
    if half.interleaved != joined.interleaved:
        return NearMiss(joined.end, _OTHERWISE.format(_WAYS[half.interleaved], _WAYS[joined.interleaved]))
    other_factor = None
    for product, sin in _with_operand(joined.end, "mul"):
        for total, other in _with_operand(product, "add", "sub"):
            call, outer = call_of(other), call_of(total)
            if call is None or outer is None or call.kind != "mul":
                continue
            if outer.kind == "sub" and outer["other"] is not product:
                continue  # turned * sin - x * cos
            for x, cos in either_way(call):
                if x is half.x:
                    found = _Rotation(total, half.x, cos, sin, joined.interleaved, inverse ^ (outer.kind == "sub"))
                    return found.match(halves_of_tables=False)
            other_factor = total
    if other_factor is None:
        return None
    return NearMiss(other_factor, "what is turned is not what is multiplied by the cosine")


def _with_operand(node: Node, *kinds: str) -> Iterator[tuple[Node, Any]]:
    """Calls of two operands of which `node` is one, each with the other; none that scales an operand."""
    for user in node.users:
        call = call_of(user)
        if call is None or call.kind not in kinds:
            continue
        for mine, other in either_way(call):
            if mine is node and other is not node:
                yield user, other


def _match_halves(joined: _Joined) -> Match | NearMiss | None:
    """`x1 * cos - x2 * sin` and `x2 * cos + x1 * sin`."""
    sums = _sum_of_products(joined.first), _sum_of_products(joined.second)
    for x in dict.fromkeys(item.half.x for products in sums for choices in products for item in choices):
        halves = [_of(products, x) for products in sums]
        if all(halves):
            return _match_products(joined, *halves)
    return None


def _match_products(joined: _Joined, first: Any, second: Any) -> Match | NearMiss:
    (a1, a2), (b1, b2) = first, second
    if any(item.half.interleaved != joined.interleaved for item in (a1, a2, b1, b2)):
        way = _WAYS[a1.half.interleaved]
        return NearMiss(joined.end, _OTHERWISE.format(way, _WAYS[joined.interleaved]))
    if a1.table is not b2.table or a2.table is not b1.table:
        return NearMiss(joined.end, "its halves are not multiplied by the same cosine and sine")
    signs = (a1.sign, a2.sign, b1.sign, b2.sign)
    if signs not in ((1, -1, 1, 1), (1, 1, -1, 1)):
        return NearMiss(joined.end, "its signs are not those of a rotation")
    inverse = a2.sign == 1
    return _Rotation(joined.end, a1.half.x, a1.table, a2.table, joined.interleaved, inverse).match(
        halves_of_tables=True
    )


def _sum_of_products(node: object) -> list[list[_Product]]:
    """The two products of which a node is the sum, each in every way to read one; or none."""
    call = call_of(node)
    if call is None or call.kind not in ("add", "sub") or call["alpha"] != 1:
        return []
    one, other = _products(call.input), _products(call["other"])
    return [one, [replace(item, sign=-item.sign) for item in other] if call.kind == "sub" else other]


def _products(node: object) -> list[_Product]:
    node, sign = _without_neg(node)
    call = call_of(node)
    if call is None or call.kind != "mul":
        return []
    found = []
    for factor, table in either_way(call):
        (factor, one), (table, other) = _without_neg(factor), _without_neg(table)
        half = _half(factor)
        if half is not None and isinstance(table, Node):
            found.append(_Product(half, table, sign * one * other))
    return found


def _without_neg(node: Any) -> tuple[Any, int]:
    call = call_of(node)
    return (call.input, -1) if call is not None and call.kind == "neg" else (node, 1)


def _of(products: list[list[_Product]], x: Node) -> tuple[_Product, ...]:
    """The products with the first and the second half of x; empty where they are others."""
    choices = [[item for item in readings if item.half.x is x] for readings in products]
    if [len(readings) for readings in choices] != [1, 1]:
        return ()
    chosen = sorted((readings[0] for readings in choices), key=lambda item: item.half.number)
    return tuple(chosen) if [item.half.number for item in chosen] == [0, 1] else ()


@dataclass(frozen=True)
class _Rotation:
    end: Node
    x: Node
    cos: Any
    sin: Any
    interleaved: bool
    inverse: bool

    def match(self, *, halves_of_tables: bool) -> Match | NearMiss:
        x, made = value_of(self.x), value_of(self.end)
        cos, sin = value_of(self.cos), value_of(self.sin)
        if x is None or made is None or cos is None or sin is None:
            return NearMiss(self.end, "nothing is known of its tables")
        if not same_shape(x, made):
            return NearMiss(self.end, f"its tables make {list(made.shape)} of its input {list(x.shape)}")
        columns = x.shape[-1] // 2 if halves_of_tables else x.shape[-1]
        for table in (cos, sin):
            found = table.shape[-1] if table.ndim else 1
            if not same_size(found, columns):
                return NearMiss(self.end, f"its tables have {found} columns, where {columns} were expected")
        end = with_narrowing(self.end)
        options = {"interleaved": self.interleaved, "inverse": self.inverse, "dtype": dtype_of(end)}
        return Match(end, tuple(map(before_widening, (self.x, self.cos, self.sin))), options)


SPEC = traced_kernel(
    "rope",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=gain_by_fusing(forward=5, backward=9),
    triton=(kernel.rotate_kernel,),
    traced=(kernel.traceable, kernel.backward_traceable),
)
