"""The 0-1 knapsack: what is worth most of what fits."""

from __future__ import annotations

from collections.abc import Sequence

# In how many parts room is dealt out: what an item needs is rounded up to whole parts.
_PARTS = 1000


def most_valuable(sizes: Sequence[int], values: Sequence[float], *, room: int) -> list[int]:
    """The items that fit into `room` together and are worth most, by dynamic programming over room (Bellman, 1957).

    Args:
        sizes: Of the items, in the unit of `room`.
        values: What they are worth.
        room: What they share.

    Returns:
        Their numbers, ascending; of two sets that are worth the same always the same.
    """
    part = max(1, -(-room // _PARTS))
    parts = max(0, room // part)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (parts + 1)  # by the memory that may be used
    for number, (size, value) in enumerate(zip(sizes, values, strict=True)):
        weight = -(-size // part)
        for used in range(parts, weight - 1, -1):
            worth, items = best[used - weight]
            if worth + value > best[used][0]:
                best[used] = (worth + value, (*items, number))
    chosen = set(best[parts][1])
    for number in sorted(range(len(sizes)), key=lambda number: -values[number]):  # into what rounding up has left
        if sum(sizes[item] for item in chosen | {number}) <= room:
            chosen.add(number)
    return sorted(chosen)
