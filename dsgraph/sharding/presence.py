"""A rank says when its program ends, so that the others do not wait for it until the time is over."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from dsgraph import compat
from dsgraph.errors import on_one_line

# Seconds between two looks of a rank that waits: at first, and at last.
_PAUSES = (0.0005, 0.02)
# Between them a pause is this share of the time waited so far, so that little is waited in vain.
_SHARE = 0.1
# Seconds of waiting after which a rank also looks whether the others have ended.
_LOOKS_FOR_ENDS = 0.05
# How long a launcher has to end this rank when another one has failed, seconds: the other's error is the one to see.
_GRACE = 3.0
_WITH = " with "


@dataclass(eq=False)
class Presence:
    """This rank, as long as its program runs.

    Attributes:
        store: The store through which the default process group met, on a connection of its own.
        rank: Its global rank.
    """

    store: dist.Store
    rank: int

    @staticmethod
    def announced() -> Presence:
        """This rank's, which the others learn the end of."""
        presence = Presence(compat.own_store(), dist.get_rank())
        atexit.register(_say_that_it_ends, weakref.ref(presence))
        return presence

    def ended(self, ranks: Sequence[int]) -> dict[int, str]:
        """Those of these ranks whose program has ended, and how: "has ended with ValueError: ..."."""
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
        """Waits until something has come from other ranks.

        Args:
            come: Whether it has.
            ranks: From whom.
            seconds: For how long.
            slow: Number of seconds after which a function is called, once.

        Returns:
            Why it will not come, in words; empty when it has.

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
                if ended:  # and may have set just before what is waited for
                    until = min(until, time.monotonic() + (_GRACE if _WITH in ended else 0))
            if time.monotonic() > until:
                return ended or f"it did not come within {seconds:g} s"
            time.sleep(min(max(_PAUSES[0], _SHARE * waited), _PAUSES[1]))
        return ""


class _Presences:
    """The presence in the process group that there is."""

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[dist.ProcessGroup], Presence] | None = None

    def now(self) -> Presence:
        """This rank's."""
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
