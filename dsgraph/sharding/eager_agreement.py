"""Ranks agree on each eager collective, which gloo would else mix up, abort in, or wait in for minutes.

A graph's collectives are compared when it is compiled. Those of eager code come one by one. Ahead of each a rank notes
in the process group's store what it is about to do: one key a rank, overwritten each time, and nobody waits for it.
What follows what is learned: where a collective is not the one that followed the last few of them before, a rank waits
for the notes of all others, and raises if one differs. Where it is, no rank waits. So all ranks learn the same, and a
rank that leaves the known way alone finds out from the notes of the others, which wait in a collective that it never
joins: it raises, and they do when its process ends.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from dsgraph import compat
from dsgraph.errors import PartitionError, RanksDisagreeError, on_one_line
from dsgraph.inductor_ext import backend_name

from .mesh import axis_group, shard_dim
from .presence import Presence, presences

VARIABLE = "DSGRAPH_EAGER_PATIENCE"
_DEFAULT_PATIENCE = 30.0
# By how many collectives it is told which one follows: a tied weight is used in several places.
_CONTEXT = 4

_READ_EVERYWHERE = (
    "To read a parameter is a collective: read it on all ranks, not under `if rank == 0:`. "
    "dict(model.named_parameters())[name] is the rank's own shard, a DTensor, and needs no other rank"
)
_SYNCED = (
    "A rank whose sequences are complete must go on while others generate: call model.generate(..., synced_gpus=True)"
)
_SAME_PARTS = "Every rank must run the same parts of the model, equally often and in the same order"


def patience_of(environ: Mapping[str, str] = os.environ) -> float:
    """How long a read outside a forward waits for the other ranks, seconds; 0: nothing eager is compared.

    Raises:
        PartitionError: The variable holds no such number.
    """
    text = environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT_PATIENCE
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise PartitionError(f"{VARIABLE} is {text!r}; it takes a number of seconds, or 0 to compare nothing")
    return seconds


def is_outside() -> bool:
    """Whether no module is being called and no backward runs: other ranks may never come here."""
    # By name, as Dynamo runs code objects of its own in place of the module's.
    return compat.running_backward() < 0 and not _is_running(compat.MODULE_CALL.co_name)


@dataclass(frozen=True)
class Intent:
    """What a rank is about to do.

    Attributes:
        does: In words, equal on all ranks: "gathers parameter 'layer.weight'".
        outside: Whether it does so outside any forward or backward.
    """

    does: str
    outside: bool = False

    def __str__(self) -> str:
        return self.does + " outside a forward" * self.outside


@dataclass(frozen=True)
class _Note:
    """What a rank says of itself.

    Attributes:
        number: How many eager collectives it has come to.
        intent: The last of them.
        failed: The last of them on which ranks did not agree; 0 if there is none. Who comes to it late finds it here.
        wrong: What was wrong with it.
    """

    number: int
    intent: Intent
    failed: int = 0
    wrong: str = ""

    @staticmethod
    def read(text: bytes) -> _Note:
        number, does, outside, failed, wrong = json.loads(text)
        return _Note(number, Intent(does, outside), failed, wrong)

    def written(self) -> str:
        return json.dumps([self.number, self.intent.does, self.intent.outside, self.failed, self.wrong])


@dataclass(eq=False)
class EagerAgreement:
    """Some ranks of a mesh, which compare their eager collectives.

    Attributes:
        ranks: Global ranks that take part.
        timeout: How long a collective may take, seconds.
        patience: How long a read outside a forward waits for the others, seconds; 0: nothing is compared.
    """

    ranks: tuple[int, ...]
    timeout: float
    patience: float
    _notes: _Notes | None = field(default=None, repr=False)
    _last: tuple[Intent, ...] = ()
    _follows: dict[tuple[Intent, ...], Intent] = field(default_factory=dict, repr=False)

    @staticmethod
    def over(mesh: DeviceMesh, ranks: tuple[int, ...]) -> EagerAgreement:
        """An agreement of these ranks of a mesh; one that compares nothing where the others are not real.

        Nor does it where ranks met in a file: it would grow with each note, and takes ten milliseconds to be read.
        """
        group = axis_group(mesh, shard_dim(mesh))
        is_real = len(ranks) > 1 and backend_name(group, mesh.device_type) != "fake" and not compat.store_is_a_file()
        timeout = compat.group_timeout(group, mesh.device_type).total_seconds()
        return EagerAgreement(ranks, timeout, patience_of() if is_real else 0)

    @contextmanager
    def on(self, intent: Intent, *, waits: bool = False) -> Iterator[None]:
        """Around a collective: compares it ahead, and says what was waited for where it fails.

        Args:
            intent: What it is.
            waits: Whether to wait for all ranks even if it is what followed before.

        Raises:
            RanksDisagreeError: Another rank would do something else, has ended, or did not come in time.
        """
        if not self.patience:
            yield
            return
        if self._notes is None:
            self._notes = _Notes.of(self.ranks)
        self._confirm(self._notes, intent, waits=waits)
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            self._forget()
            wrong = (
                f"rank {self._notes.rank} {intent}, which failed ({on_one_line(error)}). {self._others(self._notes)}"
            )
            raise RanksDisagreeError(f"{wrong}. {_advice(wrong)}") from error

    def _confirm(self, notes: _Notes, intent: Intent, *, waits: bool) -> None:
        before = notes.own
        note = replace(before, number=before.number + 1, intent=intent)
        notes.write(note)
        if waits or self._follows.get(self._last) != intent:
            wrong, absent = self._compare(notes, intent)
            if absent:  # who comes later finds nothing of it
                notes.write(before)
            elif wrong:
                notes.write(replace(note, failed=note.number, wrong=wrong))
                self._forget()
            if wrong:
                raise RanksDisagreeError(f"{wrong}. {_advice(wrong)}")
            self._follows[self._last] = intent
        self._last = (*self._last, intent)[-_CONTEXT:]

    def _forget(self) -> None:
        """After an error nothing is known to follow."""
        self._last = ()
        self._follows.clear()

    def _compare(self, notes: _Notes, intent: Intent) -> tuple[str, list[int]]:
        """What is wrong, in words, empty if nothing is; and the ranks that have not come in time."""
        absent, found = [rank for rank in self.ranks if rank != notes.rank], [""]
        mine, number = f"rank {notes.rank} {intent}", notes.own.number

        def come() -> bool:
            for rank, note in notes.read(absent).items():
                if note.failed == number:
                    found[0] = note.wrong
                elif note.number == number and note.intent != intent:
                    pair = sorted([(notes.rank, intent), (rank, note.intent)], key=lambda each: each[0])
                    found[0] = ", ".join(f"rank {who} {what}" for who, what in pair) + ": they part here"
                elif note.number >= number:
                    absent.remove(rank)
            return bool(found[0]) or not absent

        limit = self.patience if intent.outside else self.timeout
        try:
            why = notes.presence.wait(come, absent, seconds=limit)
        except dist.DistNetworkError:
            return f"{mine}, and the process that keeps the ranks' store has ended", []
        if not why:
            return found[0], []
        if "ended" in why:
            return f"{mine}, {why}", []
        longer = f"; if they only take longer, set {VARIABLE} to more seconds" * intent.outside
        return (
            f"{mine}, and ranks {absent} did not come to it within {limit:g} s: they have died, hang, do something "
            f"else, or wait in a compiled graph{longer}"
        ), absent

    def _others(self, notes: _Notes) -> str:
        """Where the others were last seen, in words."""
        with suppress(RuntimeError):
            others = [rank for rank in self.ranks if rank != notes.rank]
            seen = {rank: str(note.intent) for rank, note in notes.read(others).items()}
            seen |= notes.presence.ended(others)
            return ", ".join(f"rank {rank} {what}" for rank, what in seen.items()) + ", as last seen"
        return "The store through which ranks talk is gone"


class _Agreements:
    """One agreement for the same ranks, of however many models, for as long as the process group lives."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[weakref.ref[dist.ProcessGroup], EagerAgreement]] = {}

    def over(self, mesh: DeviceMesh, ranks: tuple[int, ...]) -> EagerAgreement:
        world = dist.group.WORLD
        assert world is not None
        known = self._known.get(ranks)
        if known is None or known[0]() is not world:
            known = self._known[ranks] = (weakref.ref(world), EagerAgreement.over(mesh, ranks))
        return known[1]


eager_agreements = _Agreements()


@dataclass(eq=False)
class _Notes:
    """The notes of some ranks.

    Attributes:
        presence: This rank's.
        prefix: What the names of the keys begin with.
        own: This rank's.
    """

    presence: Presence
    prefix: str
    own: _Note = field(default_factory=lambda: _Note(0, Intent("has not begun")))

    @staticmethod
    def of(ranks: tuple[int, ...]) -> _Notes:
        """Those of these ranks."""
        presence = presences.now()
        members = hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:12]
        # A process group may be made anew on the same store: the n-th of each rank belong together.
        number = presence.store.add(f"dsgraph/{members}/eager/{presence.rank}", 1)
        return _Notes(presence, f"dsgraph/{members}/eager/{number}")

    @property
    def rank(self) -> int:
        """This rank."""
        return self.presence.rank

    def write(self, note: _Note) -> None:
        """Overwrites this rank's, and waits for nobody."""
        self.own = note
        self.presence.store.set(f"{self.prefix}/{self.rank}", note.written())

    def read(self, ranks: Sequence[int]) -> dict[int, _Note]:
        """Those that there are."""
        store, keys = self.presence.store, {rank: f"{self.prefix}/{rank}" for rank in ranks}
        return {rank: _Note.read(store.get(key)) for rank, key in keys.items() if store.check([key])}


def _advice(wrong: str) -> str:
    if _is_running("generate"):
        return _SYNCED
    return _READ_EVERYWHERE if "outside a forward" in wrong else _SAME_PARTS


def _is_running(function: str) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False
