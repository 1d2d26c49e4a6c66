"""For a part of a forward: what to save of it, at several amounts of memory, each the fastest of its amount.

Per part a mixed-integer programme, as in Jain et al., "Checkmate: Breaking the memory wall with optimal tensor
rematerialization" (MLSys 2020), without its order of execution: a value that the backward needs is saved or computed
again, and what is computed again needs its sources in one of these ways. HiGHS solves it (`scipy.optimize.milp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from .forward_values import Part

AMOUNTS = 8
"""How many amounts of memory are tried between the least and the most that a part can save."""

_GAP = 1e-3
_NODES = 2000  # of the search: a limit that is the same on every rank, which a limit of time is not


@dataclass(frozen=True)
class Policy:
    """What is saved of a part.

    Attributes:
        saved: Positions in the part of what is saved.
        bytes: Their bytes.
        seconds: What computing the rest again takes.
    """

    saved: frozenset[int]
    bytes: int
    seconds: float


def policies_of(part: Part) -> list[Policy]:
    """Policies of a part, from the most bytes to the least; none saves more in more time than another."""
    programme = _Programme(part)
    most = programme.solve()
    if most is None:
        return []
    least = programme.solve(fewest_bytes=True)
    found = [most]
    if least is not None and least.bytes < most.bytes:
        for number in range(AMOUNTS - 2, -1, -1):
            room = least.bytes + (most.bytes - least.bytes) * number // (AMOUNTS - 1)
            policy = programme.solve(room=room)
            if policy is not None and policy.bytes < found[-1].bytes:
                found.append(policy)
    return found


class _Programme:
    """Variables: for each value whether it is saved, then for each whether it is computed again."""

    def __init__(self, part: Part) -> None:
        self._values = part.values
        count = len(part.values)
        number = {value.node: position for position, value in enumerate(part.values)}
        rows: list[list[tuple[int, float]]] = []
        least: list[float] = []
        for position, value in enumerate(part.values):
            if value.needed:
                rows.append([(position, 1), (count + position, 1)])
                least.append(1)
            for source in value.sources:
                rows.append([(number[source], 1), (count + number[source], 1), (count + position, -1)])
                least.append(0)
        self._constraint = _at_least(rows, least, 2 * count)
        low, high = np.zeros(2 * count), np.ones(2 * count)
        for position, value in enumerate(part.values):
            if value.saved is not None:
                low[position] = high[position] = float(value.saved)
            if value.saved is True or not value.may_repeat:
                high[count + position] = 0
        self._bounds = Bounds(low, high)
        self._bytes = np.array([float(value.bytes) for value in part.values])
        self._seconds = np.array([value.seconds for value in part.values])

    def solve(self, *, room: int | None = None, fewest_bytes: bool = False) -> Policy | None:
        """The fastest policy within `room`, or the one of fewest bytes; None where there is none."""
        count = len(self._values)
        total, time = max(1.0, float(self._bytes.sum())), max(1e-12, float(self._seconds.sum()))
        # What is of second rank counts a thousandth.
        weights = (1.0, 1e-3) if fewest_bytes else (1e-3, 1.0)
        cost = np.concatenate([self._bytes / total * weights[0], self._seconds / time * weights[1]])
        cost[count:] += 1e-9  # nothing is computed again for nothing
        constraints = [self._constraint] if self._constraint is not None else []
        if room is not None:
            row = np.concatenate([self._bytes / total, np.zeros(count)])[None, :]
            constraints.append(LinearConstraint(row, ub=room / total))
        found = milp(
            cost,
            integrality=np.concatenate([np.ones(count), np.zeros(count)]),
            bounds=self._bounds,
            constraints=constraints,
            options={"mip_rel_gap": _GAP, "node_limit": _NODES},
        )
        if found.x is None:
            return None
        saved = frozenset(np.flatnonzero(found.x[:count] > 0.5).tolist())
        again = found.x[count:]
        size = sum(self._values[position].bytes for position in saved)
        return Policy(saved, size, float((self._seconds * again).sum()))


def _at_least(
    rows: Sequence[Sequence[tuple[int, float]]], least: Sequence[float], width: int
) -> LinearConstraint | None:
    if not rows:
        return None
    entries = [(number, column, factor) for number, row in enumerate(rows) for column, factor in row]
    lines, columns, factors = zip(*entries, strict=True)
    return LinearConstraint(
        coo_array((factors, (lines, columns)), shape=(len(rows), width)).tocsr(), lb=np.array(least)
    )
