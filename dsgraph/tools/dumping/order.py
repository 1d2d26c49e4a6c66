"""The search for items that have changed places."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def out_of_order(places: Sequence[int]) -> list[int]:
    """Return the indices of the fewest items that, taken out, leave the rest in ascending order.

    The rest is a longest increasing subsequence (Schensted 1961).
    """
    tails: list[int] = []  # smallest last place of an ascending run of each length
    ends: list[int] = []  # its index
    previous = [-1] * len(places)
    for index, place in enumerate(places):
        length = bisect_left(tails, place)
        previous[index] = ends[length - 1] if length else -1
        if length == len(tails):
            tails.append(place)
            ends.append(index)
        else:
            tails[length], ends[length] = place, index
    in_order = set()
    index = ends[-1] if ends else -1
    while index >= 0:
        in_order.add(index)
        index = previous[index]
    return [index for index in range(len(places)) if index not in in_order]
