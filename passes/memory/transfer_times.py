"""Start and end times of transfers: plain numbers, no graphs."""

from __future__ import annotations

from collections.abc import Sequence


def latest_starts(needed: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return the latest start times of transfers over one link, so that each arrives in time.

    Args:
        needed: When each is needed, in ascending order, which is that of the transfers.
        seconds: Time of each by itself.

    Returns:
        Times, in the same order; negative if even the start of the graph is too late.
    """
    starts = list[float]()
    free = float("inf")
    for need, takes in zip(reversed(needed), reversed(seconds), strict=True):
        free = min(need, free) - takes
        starts.append(free)
    return starts[::-1]


def earliest_ends(asked: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return the end times of transfers over one link that are requested at the given times, in ascending order."""
    ends, free = list[float](), 0.0
    for time, takes in zip(asked, seconds, strict=True):
        free = max(time, free) + takes
        ends.append(free)
    return ends


def first_together(sizes: Sequence[int], number: int, *, room: int) -> int:
    """Return the first of the transfers up to `number` that may run together with it within `room`.

    A transfer by itself may be larger than the room.
    """
    first, total = number, sizes[number]
    while first > 0 and total + sizes[first - 1] <= room:
        first -= 1
        total += sizes[first]
    return first
