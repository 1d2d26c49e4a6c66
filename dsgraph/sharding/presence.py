"""A rank says when its program ends, so that the others do not wait for it until the time is over."""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from dsgraph import compat
from dsgraph.errors import RanksDisagreeError, on_one_line

# How often a rank that waits looks for what it waits for, seconds: at first, and at last.
_PAUSES = (0.0002, 0.02)
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
        self, come: Callable[[], bool], ranks: Sequence[int], *, seconds: float, elsewhere: Callable[[], str] = str
    ) -> str:
        """Waits until something has come from other ranks.

        Args:
            come: Whether it has.
            ranks: From whom.
            seconds: For how long.
            elsewhere: Where else a rank has gone, in words, so that it will not come; empty: it may.

        Returns:
            Why it will not come, in words; empty when it has.

        Raises:
            torch.distributed.DistNetworkError: The store is gone.
        """
        until, pause, ended = time.monotonic() + seconds, _PAUSES[0], ""
        while not come():
            if not ended and pause == _PAUSES[1]:
                gone = elsewhere()
                if gone and not come():  # who came first went on with the others
                    return gone
                ended = ", ".join(f"rank {rank} {how}" for rank, how in self.ended(ranks).items())
                if ended:  # and may have set just before what is waited for
                    until = min(until, time.monotonic() + (_GRACE if _WITH in ended else 0))
            if time.monotonic() > until:
                return ended or f"it did not come within {seconds:g} s"
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSES[1])
        return ""


@dataclass(eq=False)
class Passage:
    """What a rank has passed of an order of events that all ranks share, in a note that the others can read.

    Attributes:
        presence: This rank's.
        prefix: What the names of the keys begin with.
        passed: How many events this rank has come to.
        at: The last of them.
    """

    presence: Presence
    prefix: str
    passed: int = 0
    at: str = ""

    @staticmethod
    def of(what: str) -> Passage | None:
        """One of this process group; the n-th of each rank belong together. None where there is nobody to tell.

        Nor is there one where ranks met in a file, which would grow with each note.
        """
        if dist.get_world_size() == 1 or compat.store_is_a_file() or dist.get_backend() == "fake":
            return None
        presence = presences.now()
        return Passage(presence, f"dsgraph/{what}/{presence.store.add(f'dsgraph/{what}/{presence.rank}', 1)}")

    @contextmanager
    def through(self, event: str, ranks: Sequence[int]) -> Iterator[None]:
        """Around an event: notes it, waits for nobody, and says where the others are if it fails for want of them.

        Args:
            event: What it is: "a micro-batch".
            ranks: Who takes part.

        Raises:
            RanksDisagreeError: A collective failed, and another rank has come to another event.
        """
        self.passed, self.at = self.passed + 1, event
        self.presence.store.set(f"{self.prefix}/{self.presence.rank}", f"{self.passed} {event}")
        try:
            yield
        except RuntimeError as error:
            is_ours = isinstance(error, (RanksDisagreeError, dist.DistError)) or "gloo" in str(error)
            where = self.elsewhere(ranks) if is_ours and self.at else ""
            if not where:
                raise
            raise RanksDisagreeError(f"{where}. {on_one_line(error)}") from error

    def take_back(self) -> None:
        """After an event that never was, as others did not come to it."""
        self.passed, self.at = self.passed - 1, ""

    def elsewhere(self, ranks: Sequence[int]) -> str:
        """Which of these ranks has come to another event where this rank stands, in words; empty if none has."""
        store, mine = self.presence.store, self.presence.rank
        with suppress(RuntimeError):  # the store may be gone
            for rank in ranks:
                key = f"{self.prefix}/{rank}"
                if rank == mine or not store.check([key]):
                    continue
                passed, _, event = store.get(key).decode().partition(" ")
                if int(passed) >= self.passed and event != self.at:
                    return (
                        f"rank {mine} is in {self.at}, and rank {rank} in {event}: they part here. All ranks must call "
                        "save_checkpoint and load_checkpoint at the same point, not under `if rank == 0:`"
                    )
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
