"""Policies for a part of a forward: the values to save, at several amounts of memory, each the fastest of its amount.

Each part is a mixed-integer program, as in Jain et al., "Checkmate: Breaking the memory wall with optimal tensor
rematerialization" (MLSys 2020), without its order of execution: a value that the backward needs is saved or recomputed,
and a recomputed value needs its sources in one of these ways. HiGHS solves it (`scipy.optimize.milp`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import Node

from .forward_values import ForwardPart
from .integer_program import Bounded, Vector, minimize, sparse_rows

AMOUNTS = 8
"""Number of amounts of memory that are tried between the least and the most that a part can save."""

_GAP = 1e-3
_NODES = 2000


@dataclass(frozen=True)
class TransferPolicy:
    """The way values are offloaded.

    Attributes:
        tier: "host" or "disk".
        seconds_per_byte: Time of one direction.
        hide: True if transfers run while the device computes.
    """

    tier: str
    seconds_per_byte: float
    hide: bool


@dataclass(frozen=True)
class Policy:
    """A policy for the values of a part.

    Attributes:
        saved: Positions in the part of the saved values.
        bytes: Their bytes.
        seconds: Time of recomputing the rest, and of transfers that nothing hides.
        offloaded: Positions of the offloaded values.
    """

    saved: frozenset[int]
    bytes: int
    seconds: float
    offloaded: frozenset[int] = frozenset()


def policies_of(part: ForwardPart, transfers: TransferPolicy | None = None) -> list[Policy]:
    """Return policies of a part, from the most bytes to the least; none is worse than another in both bytes and time.

    Args:
        part: The part.
        transfers: How values may be offloaded; None if they may not.
    """
    programme = _Programme(part, transfers)
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


def least_saved_bytes(part: ForwardPart, *, read: Container[Node], costly: Container[Node]) -> int:
    """Return a lower bound of the bytes of a part that must be saved if costly values are not recomputed.

    Values of other parts count as available.

    Args:
        part: The part.
        read: The values that the backward reads.
        costly: The values that are not recomputed.
    """
    values = [
        replace(
            value,
            saved=None if value.bytes else value.saved,
            needed=value.node in read,
            may_repeat=value.may_repeat and value.node not in costly,
        )
        for value in part.values
    ]
    found = _Programme(replace(part, values=tuple(values)), None).solve(fewest_bytes=True)
    return int(found.bytes * (1 - _GAP)) if found is not None else 0


class _Programme:
    """An integer program with variables for each value: saved, offloaded, recomputed.

    And for the seconds of transfers.
    """

    def __init__(self, part: ForwardPart, transfers: TransferPolicy | None) -> None:
        self._values = part.values
        count = len(part.values)
        number = {value.node: position for position, value in enumerate(part.values)}
        self._bytes = np.array([float(value.bytes) for value in part.values])
        self._seconds = np.array([value.seconds for value in part.values])
        per_byte = 2 * transfers.seconds_per_byte if transfers is not None else 0.0
        self._transfers = self._bytes * per_byte
        self._time = max(1e-12, float(self._seconds.sum() + self._transfers.sum()))
        # At least: a value that is needed is there, and so is what one that is computed again is computed of.
        rows: list[list[tuple[int, float]]] = []
        least: list[float] = []
        for position, value in enumerate(part.values):
            if value.needed:
                rows.append([(position + way * count, 1) for way in range(3)])
                least.append(1)
            for source in value.sources:
                there = [(number[source] + way * count, 1.0) for way in range(3)]
                rows.append([*there, (2 * count + position, -1)])
                least.append(0)
        hidden = float(self._seconds.sum()) if transfers is not None and transfers.hide else 0.0
        moved = [(count + position, -float(size) / self._time) for position, size in enumerate(self._transfers) if size]
        rows.append([*moved, (3 * count, 1)])
        least.append(-hidden / self._time)
        self._constraint = _at_least(rows, least, 3 * count + 1)
        self._bounds = _bounds(part, transfers is not None)

    def solve(self, *, room: int | None = None, fewest_bytes: bool = False) -> Policy | None:
        """Return the fastest policy within `room`, or the one of fewest bytes; None if there is none."""
        count = len(self._values)
        total = max(1.0, float(self._bytes.sum()))
        # The second criterion counts a thousandth.
        weights = (1.0, 1e-3) if fewest_bytes else (1e-3, 1.0)
        saved, again = self._bytes / total * weights[0], self._seconds / self._time * weights[1]
        moved = np.full(count, 1e-6)  # nothing travels for nothing
        cost = np.concatenate([saved, moved, again + 1e-9, [weights[1]]])  # nor is computed again
        constraints = [self._constraint]
        if room is not None:
            row = np.concatenate([self._bytes / total, np.zeros(2 * count + 1)])[None, :]
            constraints.append(Bounded(row, high=room / total))
        low, high = self._bounds
        found = minimize(
            cost,
            integral=np.array([1] * (2 * count) + [0] * (count + 1)),
            low=low,
            high=high,
            constraints=constraints,
            gap=_GAP,
            nodes=_NODES,
        )
        if found is None:
            return None
        kept = frozenset(np.flatnonzero(found[:count] > 0.5).tolist())
        away = frozenset(np.flatnonzero(found[count : 2 * count] > 0.5).tolist()) - kept
        size = sum(self._values[position].bytes for position in kept)
        seconds = float((self._seconds * found[2 * count : -1]).sum() + found[-1] * self._time)
        return Policy(kept, size, seconds, away)


def _bounds(part: ForwardPart, may_offload: bool) -> tuple[Vector, Vector]:
    count = len(part.values)
    low, high = np.zeros(3 * count + 1), np.ones(3 * count + 1)
    high[-1] = np.inf
    for position, value in enumerate(part.values):
        leaves = may_offload and value.may_offload
        high[count + position] = float(leaves)
        if value.saved is not None:
            low[position] = float(value.saved and not leaves)
            high[position] = float(value.saved)
        if value.saved is True or not value.may_repeat:
            high[2 * count + position] = 0
    return low, high


def _at_least(rows: Sequence[Sequence[tuple[int, float]]], least: Sequence[float], width: int) -> Bounded:
    entries = [(number, column, factor) for number, row in enumerate(rows) for column, factor in row]
    return Bounded(sparse_rows(entries, (len(rows), width)), low=np.array(least))
