"""The assignment of a policy to each part of a forward, so that a step fits into a limit in the least time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .integer_program import Bounded, minimize, sparse_rows

_GAP = 1e-4
_NODES = 5000


@dataclass(frozen=True)
class Option:
    """One policy of one part. Bytes.

    Attributes:
        seconds: Time of recomputation.
        saved: Bytes that it saves for the backward.
        forward: Bytes that the part needs in the forward beside the saved bytes of earlier parts.
        backward: Bytes that it needs in the backward beside the saved bytes of it and of earlier parts.
    """

    seconds: float
    saved: int
    forward: int
    backward: int


def assign(choices: Sequence[Sequence[Option]], limit: int | None, *, in_flight: int = 1) -> list[int] | None:
    """Return the choice for each part.

    In the forward of a part, the saved values of earlier parts are in memory; in its backward also its own: later parts
    are finished. Those of all parts are in memory for each further micro-batch.

    Args:
        choices: The options of each part, in program order.
        limit: Bytes; None for the least memory that can be reached, in the least time.
        in_flight: Number of micro-batches whose saved values are in memory at once.

    Returns:
        For each part the number of its choice; None if nothing fits.
    """
    width = sum(map(len, choices))
    time = max(1e-12, sum(max(item.seconds for item in part) for part in choices))
    unit = max(1.0, float(max(item.saved + item.forward + item.backward for part in choices for item in part)))
    cost = np.zeros(width + 1 + len(choices))
    cost[:width] = [item.seconds / time + 1e-6 * item.saved / unit for part in choices for item in part]
    if limit is None:
        cost[:width] *= 1e-3
        cost[width] = 1.0
    high = np.full(len(cost), np.inf)
    high[:width] = 1
    if limit is not None:
        high[width] = limit / unit
    one, ends = np.zeros((len(choices), len(cost))), np.cumsum([0, *map(len, choices)])
    for number in range(len(choices)):
        one[number, ends[number] : ends[number + 1]] = 1
    found = minimize(
        cost,
        integral=np.array([1] * width + [0] * (1 + len(choices))),
        low=np.zeros(len(cost)),
        high=high,
        constraints=[Bounded(one, low=1, high=1), Bounded(_rows(choices, unit, in_flight), high=0)],
        gap=_GAP,
        nodes=_NODES,
    )
    if found is None:
        return None
    return [int(np.argmax(found[start:end])) for start, end in pairwise(ends.tolist())]


def needs(options: Sequence[Option], *, in_flight: int = 1) -> int:
    """Return the bytes of a step with the given option for each part, in program order; see `assign`."""
    saved, most = (in_flight - 1) * sum(option.saved for option in options), 0
    for option in options:
        most = max(most, saved + option.forward, saved + option.saved + option.backward)
        saved += option.saved
    return most


def _rows(choices: Sequence[Sequence[Option]], unit: float, in_flight: int) -> Any:
    """Return three rows for each part: the limits of its forward and of its backward, and the saved bytes so far.

    The variables after the options are the step's limit, and for each part the bytes that it and earlier parts save.
    """
    entries: list[tuple[int, int, float]] = []
    width = sum(map(len, choices))
    column = 0
    for number, part in enumerate(choices):
        total = width + 1 + number
        if number:
            entries += [(3 * number + row, total - 1, 1.0) for row in (0, 2)]
        for item in part:
            entries.append((3 * number, column, item.forward / unit))
            entries.append((3 * number + 1, column, item.backward / unit))
            entries.append((3 * number + 2, column, item.saved / unit))
            column += 1
        entries += [(3 * number, width, -1.0), (3 * number + 1, width, -1.0)]
        entries += [(3 * number + 1, total, 1.0), (3 * number + 2, total, -1.0)]
        if in_flight > 1:  # entries of one place are added up
            entries += [(3 * number + row, width + len(choices), in_flight - 1.0) for row in (0, 1)]
    return sparse_rows(entries, (3 * len(choices), width + 1 + len(choices)))
