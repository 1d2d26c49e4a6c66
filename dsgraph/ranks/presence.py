"""A rank announces the end of its program, so that the others do not wait for it until the timeout."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from dsgraph.compat.process_groups import own_store
from dsgraph.utils.errors import on_one_line

# Shortest and longest pause between two checks of a waiting rank, seconds.
_PAUSES = (0.0005, 0.02)
# A pause between these bounds is this share of the time waited so far, so that little time is wasted.
_SHARE = 0.1
# Seconds of waiting after which a rank also checks whether the others have ended.
_LOOKS_FOR_ENDS = 0.05
# Seconds that a launcher has to end this rank after another one failed, so that the user sees the other's error.
_GRACE = 3.0
_WITH = " with "


@dataclass(eq=False)
class Presence:
    """The announcement of this rank, which the others can read until and after its program ends.

    Attributes:
        store: The store of the default process group, on a separate connection.
        rank: The global rank.
    """

    store: dist.Store
    rank: int

    @staticmethod
    def announced() -> Presence:
        """Return the presence of this rank, which announces its end to the others."""
        presence = Presence(own_store(), dist.get_rank())
        atexit.register(_say_that_it_ends, weakref.ref(presence))
        return presence

    def ended(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the ranks whose program has ended, each with a description: "has ended with ValueError: ..."."""
        there = [rank for rank in ranks if rank != self.rank and self.store.check([_key(rank)])]
        return {rank: self.store.get(_key(rank)).decode() for rank in there}

    def wait(
        self,
        come: Callable[[], bool],
        ranks: Sequence[int],
        *,
        seconds: float,
        slow: tuple[float, Callable[[], None]] | None = None,
    ) -> str:
        """Wait for other ranks until a condition holds.

        Args:
            come: The condition.
            ranks: The other ranks.
            seconds: The longest wait.
            slow: Number of seconds after which a function is called once, and the function.

        Returns:
            Why the condition will not hold; empty if it holds.

        Raises:
            torch.distributed.DistNetworkError: The store is gone.
        """
        started, ended = time.monotonic(), ""
        until = started + seconds
        while not come():
            waited = time.monotonic() - started
            if slow is not None and waited > slow[0]:
                slow[1]()
                slow = None
            if not ended and waited > _LOOKS_FOR_ENDS:
                ended = ", ".join(f"rank {rank} {how}" for rank, how in self.ended(ranks).items())
                if ended:  # it may have written its note just before its end
                    until = min(until, time.monotonic() + (_GRACE if _WITH in ended else 0))
            if time.monotonic() > until:
                return ended or f"it did not come within {seconds:g} s"
            time.sleep(min(max(_PAUSES[0], _SHARE * waited), _PAUSES[1]))
        return ""


class _Presences:
    """The presence of this rank in the current process group."""

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[dist.ProcessGroup], Presence] | None = None

    def now(self) -> Presence:
        """Return the presence of this rank."""
        world = dist.group.WORLD
        assert world is not None
        if self._known is None or self._known[0]() is not world:
            self._known = (weakref.ref(world), Presence.announced())
        return self._known[1]


presences = _Presences()


def _key(rank: int) -> str:
    return f"dsgraph/ended/{rank}"


def _say_that_it_ends(reference: weakref.ref[Presence]) -> None:
    presence, error = reference(), getattr(sys, "last_value", None)
    if presence is not None:
        with suppress(RuntimeError):  # the store may be gone
            presence.store.set(_key(presence.rank), "has ended" + (f"{_WITH}{on_one_line(error)}" if error else ""))
