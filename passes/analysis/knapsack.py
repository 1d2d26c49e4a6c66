"""The 0-1 knapsack problem: the most valuable items that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

# In how many parts room is dealt out: what an item needs is rounded up to whole parts.
_PARTS = 1000


def most_valuable(sizes: Sequence[int], values: Sequence[float], *, room: int) -> list[int]:
    """Return the most valuable items that fit into `room` together, as nearly as two heuristics find them.

    Dynamic programming over room (Bellman, 1957) finds the best of few items. For hundreds its rounding loses too much:
    an item smaller than a part takes a full part. Then a greedy choice by value per byte (Dantzig, 1957) is often
    better. The better of the two is returned.

    Args:
        sizes: Sizes of the items, in the unit of `room`.
        values: Their values.
        room: The available room.

    Returns:
        Their numbers, ascending; deterministic among sets of equal value.
    """
    candidates = by_parts(sizes, values, room=room), by_density(sizes, values, room=room)
    return max(candidates, key=lambda chosen: math.fsum(values[number] for number in chosen))


def by_parts(sizes: Sequence[int], values: Sequence[float], *, room: int) -> list[int]:
    """Solve by dynamic programming over thousandths of room; then fill the rest with the most valuable items."""
    part = max(1, -(-room // _PARTS))
    parts = max(0, room // part)
    best = [0.0] * (parts + 1)  # by the parts that may be used
    takes = [bytearray(parts + 1) for _ in sizes]  # for each item: the sizes at which it is part of the best choice
    weights = [-(-size // part) for size in sizes]
    for take, weight, value in zip(takes, weights, values, strict=True):
        for used in range(parts, weight - 1, -1):
            worth = best[used - weight] + value
            if worth > best[used]:
                best[used], take[used] = worth, True
    chosen, used = [], parts
    for number in reversed(range(len(sizes))):
        if takes[number][used]:
            chosen.append(number)
            used -= weights[number]
    rest = sorted(range(len(sizes)), key=lambda number: -values[number])
    return _fill(chosen, rest, sizes, room=room)


def by_density(sizes: Sequence[int], values: Sequence[float], *, room: int) -> list[int]:
    """Choose items in the order of their value per byte, each that still fits."""
    ordered = sorted(range(len(sizes)), key=lambda number: (-values[number] / max(1, sizes[number]), number))
    return _fill((), ordered, sizes, room=room)


def _fill(chosen: Iterable[int], others: Iterable[int], sizes: Sequence[int], *, room: int) -> list[int]:
    taken = set(chosen)
    left = room - sum(sizes[number] for number in taken)
    for number in others:
        if number not in taken and sizes[number] <= left:
            taken.add(number)
            left -= sizes[number]
    return sorted(taken)
