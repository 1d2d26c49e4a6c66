"""Covering arrays: few members of a product of parameters that hold every pair of values.

Most faults need one value, or two that meet. `make test` runs a covering array of each large product, `make test-all`
the whole product. Which members those are does not change from run to run: always that with the most new pairs, and of
equals that with the rarest values so far.

A test says so itself:

    @pytest.mark.covering
    @pytest.mark.parametrize("stage", (0, 1, 2, 3))
    @pytest.mark.parametrize("codegen", (None, "eager"))
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_...

All members that are not needed get the marker `full`. With `@pytest.mark.covering(1)` every single value appears, and
not every pair: for what another test tries in pairs already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from math import comb
from typing import Any

import pytest

# Some values of some axes, by the axes' numbers.
Tuple = tuple[tuple[int, Hashable], ...]


def cover(rows: Sequence[Sequence[Hashable]], strength: int = 2) -> list[int]:
    """Numbers of rows which hold every combination of `strength` values of different columns that any row holds."""
    held = [set(_tuples(row, strength)) for row in rows]
    missing: set[Tuple] = set().union(*held)
    chosen: list[int] = []
    uses: Counter[tuple[int, Hashable]] = Counter()  # of each value: so that no other one stands in all rows

    def worth(number: int) -> tuple[int, int]:
        return len(held[number] & missing), -sum(uses[value] for value in enumerate(rows[number]))

    while missing:
        best = max(range(len(rows)), key=worth)
        missing -= held[best]
        uses.update(enumerate(rows[best]))
        chosen.append(best)
    return sorted(chosen)


def _tuples(row: Sequence[Hashable], strength: int) -> Iterable[Tuple]:
    return combinations(enumerate(row), min(strength, len(row)))


def covering(
    axes: Mapping[str, Sequence[Any]], *, strength: int = 2, where: Callable[..., bool] | None = None
) -> list[tuple[Any, ...]]:
    """Few members of the product of the axes, as tuples, which hold every pair of values of different axes.

    Args:
        axes: The values of each axis, by name.
        strength: So many values meet: 2 for pairs.
        where: Called with one value of each axis, by name: whether there is such a member.
    """
    numbers = product(*(range(len(values)) for values in axes.values()))
    members = [(row, tuple(values[at] for values, at in zip(axes.values(), row, strict=True))) for row in numbers]
    if where is not None:
        members = [member for member in members if where(**dict(zip(axes, member[1], strict=True)))]
    return [members[number][1] for number in cover([row for row, _ in members], strength)]


def subsets(things: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few subsets, the empty one first, so that for each two things some hold both, one, the other, and none of them.

    After Kleitman and Spencer: which of the other subsets a thing is in is another half of them for each thing. Two
    halves of the same size differ, and those of more than half have one in common.
    """
    count = next(count for count in range(2, 100) if comb(count, count // 2 + 1) >= len(things))
    halves = combinations(range(count), count // 2 + 1)
    member_of = [set(half) for half, _ in zip(halves, things, strict=False)]
    kept = [
        tuple(thing for thing, half in zip(things, member_of, strict=True) if number in half) for number in range(count)
    ]
    return [(), *kept]


def mark_members(items: Iterable[pytest.Item]) -> None:
    """Marks those members of parametrized tests as `full` that no covering array needs."""
    groups: dict[tuple[object, str, int], list[pytest.Function]] = {}
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker is not None and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            (strength,) = marker.args or (2,)
            groups.setdefault((item.parent, item.originalname, strength), []).append(item)
    for (_, _, strength), members in groups.items():
        names = list(members[0].callspec.params)
        rows = [[_key(member.callspec.params[name]) for name in names] for member in members]
        needed = set(cover(rows, strength))
        for number, member in enumerate(members):
            if number not in needed:
                member.add_marker("full")


def _key(value: object) -> Hashable:
    """Equal for the same value: by what is written where that says everything, else by identity."""
    if isinstance(value, bool | int | float | str | bytes | tuple | None | type):
        return (type(value), repr(value))
    return id(value)
