"""Slices of values, and the effect of a reshape on a slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import Node


@dataclass(frozen=True)
class Slice:
    """The slice of a value on each rank.

    Attributes:
        dim: The dimension, 0 or more.
        parts: Number of equal pieces of the dimension, each of which is sliced: see `tensor_slices.py`.
    """

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class Refusal:
    """The reason why a call does not support slices.

    Attributes:
        reason: Human-readable text.
        parts: Number of pieces of the sliced dimension with which it would work; 0: it would not.
        blamed: The operands with wrong slices; empty: all sliced ones.
    """

    reason: str
    parts: int = 0
    blamed: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call with slices.

    Attributes:
        out: The slice of its result; None: it is replicated. A tuple for a call with several results.
        takes: Replicated operands of which it reads this rank's slice.
        args: Its positional arguments on slices; None: unchanged.
        kwargs: Its keyword arguments on slices; None: unchanged.
        is_partial: True if its result must be summed over ranks.
        added: A value to add after that sum: a bias.
        draws: True if it draws random numbers for its elements.
        target: A function to call in its place, with the name of the process group after `args`.
    """

    out: Slice | tuple[Slice | None, ...] | None
    takes: Mapping[Node, Slice] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] | None = None
    is_partial: bool = False
    added: Node | None = None
    draws: bool = False
    target: Callable[..., Any] | None = None


class Values(Protocol):
    """The graph as rules see it."""

    ranks: int

    def slice_of(self, node: object) -> Any:
        """Return a `Slice`, None for a replicated value, a tuple for several values."""

    def shape_of(self, node: object) -> tuple[Any, ...]:
        """Return the full shape."""


def name_of(node: Node) -> str:
    """Return the human-readable name of a node's function."""
    target: Any = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def only_slice(node: Node, values: Values) -> Slice:
    """Return the slice of the first operand, which is the sharded one."""
    held = values.slice_of(node.args[0])
    assert isinstance(held, Slice)
    return held


def sizes_of(node: Node) -> list[Any] | None:
    """Return the sizes that a view, expansion or permutation is given; None if they cannot be read."""
    given = node.args[1:] or tuple(node.kwargs.values())
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        return list(given[0])
    return None if any(isinstance(size, (tuple, list, torch.dtype)) for size in given) else list(given)


def same(one: Any, other: Any) -> bool:
    """Return whether two sizes are equal; symbolic ones must be the same expression, so that nothing is assumed."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)


def through_reshape(before: Sequence[Any], after: Sequence[Any], held: Slice, ranks: int) -> Slice | Refusal:
    """Return the slice of a value after `reshape`.

    The first size of the sliced dimension's split must be divisible by the ranks: the number of heads. If dimensions
    before it are merged into it, each of their elements is a piece of the result.
    """
    behind = len(before) - held.dim
    if all(map(same, before[: held.dim + 1], after)) and len(after) > held.dim:
        return held
    if len(after) >= behind and all(map(same, before[held.dim :], after[-behind:])):
        return Slice(len(after) - behind, held.parts)
    first = 0
    while first < min(held.dim, len(after)) and same(before[first], after[first]):
        first += 1
    last, end = len(before), len(after)
    while last > held.dim + 1 and end > first and same(before[last - 1], after[end - 1]):
        last, end = last - 1, end - 1
    merged, made = list(before[first:last]), list(after[first:end])
    is_known = all(isinstance(size, int) and size > 0 for size in (*merged, *made))
    if not is_known or math.prod(merged) != math.prod(made):
        return Refusal(
            f"a view from {list(before)} to {list(after)} of a tensor that is sharded along dimension {held.dim}"
        )
    return _merge(made, first, held, ahead=math.prod(merged[: held.dim - first]), ranks=ranks)


def _merge(made: list[int], first: int, held: Slice, *, ahead: int, ranks: int) -> Slice | Refusal:
    """Return the slice of a dimension that follows `ahead` elements, in the sizes `made` from dimension `first` on.

    Sizes that make up all of `ahead` leave it alone. A size that spans several of them, as in a merge of batch and
    heads, is a dimension of as many pieces, each of which is sliced.
    """
    at = 0
    while at < len(made) - 1 and ahead % made[at] == 0 and (ahead > 1 or made[at] == 1):
        ahead, at = ahead // made[at], at + 1
    if ahead == 1:
        return _split(made[at:], first + at, held, ranks)
    if held.parts > 1 or made[at] % (ahead * ranks):
        return Refusal(f"a view that merges dimension {held.dim}, which is sharded, into the dimension before it")
    return Slice(first + at, ahead)


def _split(made: list[int], first: int, held: Slice, ranks: int) -> Slice | Refusal:
    size, at = made[0], 0
    if held.parts > 1:
        if size == held.parts and at + 1 < len(made) and made[at + 1] % ranks == 0:
            return Slice(first + at + 1)
        if size % (held.parts * ranks) == 0:
            return Slice(first + at, held.parts)
        return Refusal(f"a view that splits {held.parts} pieces into {size}")
    if size % ranks == 0:
        return Slice(first + at)
    hint = size if at + 1 < len(made) and made[at + 1] % ranks == 0 else 0
    return Refusal(f"a view gives it {size} heads, which {ranks} ranks cannot share evenly", hint)
