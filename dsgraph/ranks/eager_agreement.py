"""Ranks compare their next collective before it sends data: gloo would mix up data, abort or wait.

A rank writes its next operation to the process group's store, under one key per rank that is overwritten each time.
It does so before each eager collective, each run of a compiled graph that communicates (forward and backward are two
runs), each optimizer step and each exchange of an `Agreement`. It waits for the notes of all other ranks, and raises an
error if one differs,

- at the first operation in each forward, in each backward and between them, and
- if the operation is not the one that followed the last few operations before.

Otherwise no rank waits. All ranks learn the same sequence of operations, so a rank that alone leaves this sequence is
one that waits. It reads the notes of the others, which are in a collective that it never joins, and raises an error.
The others raise one when its process ends. A note contains digests of all earlier operations, with the parameters of
compiled graphs and the number of optimizer steps, so a difference that no rank waited for is found at the next wait.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from dsgraph.compat.autograd import running_backward
from dsgraph.compat.modules import MODULE_CALL
from dsgraph.compat.process_groups import group_timeout, store_is_a_file
from dsgraph.inductor_ext import backend_name
from dsgraph.utils.errors import PartitionError, RanksDisagreeError

from .mesh import axis_group, shard_dim
from .rank_notes import Intent, Notes

VARIABLE = "DSGRAPH_EAGER_PATIENCE"
_DEFAULT_PATIENCE = 30.0
# Seconds of waiting after which a rank logs the position of all ranks.
_SLOW = 10.0
# Number of operations from which the next one is predicted: a tied weight is used in several places.
_CONTEXT = 4
# Phases of a step other than backwards, which have numbers from 0.
_FORWARD, _BETWEEN = -1, -2

_READ_EVERYWHERE = (
    "Reading a parameter is a collective: read it on all ranks, not under `if rank == 0:`. "
    "dict(model.named_parameters())[name] is the rank's own shard, a DTensor, and needs no other rank"
)
_SYNCED = "Ranks with complete sequences must go on while others generate: call model.generate(..., synced_gpus=True)"
_SAME_PARTS = (
    "Every rank must run the same parts of the model, equally often and in the same order. A rank without data for a "
    "part runs it with a batch of zeros. At stages 0 and 1, and only there, ranks may train different parts inside "
    "dsgraph.accumulate, followed by dsgraph.allreduce_gradients"
)
_SAVE_EVERYWHERE = "All ranks must save and load checkpoints at the same point, not under `if rank == 0:`"
_SAME_STEPS = "An optimizer must step on all ranks or on none"
_SAME_BACKWARDS = (
    "Every backward and every optimizer step must run on all ranks or on none. A rank whose loss must not count runs "
    "(0 * loss).backward()"
)

_log = logging.getLogger("dsgraph")


def patience_of(environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds for which a read outside a forward waits for the other ranks; 0: nothing is compared.

    Raises:
        PartitionError: The environment variable is not such a number.
    """
    text = environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else _DEFAULT_PATIENCE
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise PartitionError(f"{VARIABLE} is {text!r}; expected a number of seconds, or 0 to compare nothing")
    return seconds


def is_outside() -> bool:
    """Return True if no module is being called and no backward runs: other ranks may never reach this point."""
    # By name, as Dynamo runs code objects of its own in place of the module's.
    return running_backward() < 0 and not is_running(MODULE_CALL.co_name)


@dataclass(eq=False)
class EagerAgreement:
    """A comparison of the next operation between some ranks of a mesh.

    Attributes:
        ranks: Global ranks that take part.
        timeout: Longest time of a collective, seconds.
        patience: Time for which a read outside a forward waits for the others, seconds; 0: nothing is compared.
        models: Number of models that these ranks have partitioned.
    """

    ranks: tuple[int, ...]
    timeout: float
    patience: float
    models: int = 0
    _notes: Notes | None = field(default=None, repr=False)
    _last: tuple[Intent, ...] = ()
    _phase: int = _BETWEEN  # of the last intent: number of its backward, _FORWARD or _BETWEEN
    _follows: dict[tuple[Intent, ...], Intent] = field(default_factory=dict, repr=False)

    @staticmethod
    def over(mesh: DeviceMesh, ranks: tuple[int, ...]) -> EagerAgreement:
        """Return an agreement of these ranks of a mesh; it compares nothing if the others are not real.

        With a `FileStore` it compares nothing either: the file would grow with each note, and a read takes ten
        milliseconds.
        """
        group = axis_group(mesh, shard_dim(mesh))
        is_real = len(ranks) > 1 and backend_name(group, mesh.device_type) != "fake" and not store_is_a_file()
        timeout = group_timeout(group, mesh.device_type).total_seconds()
        return EagerAgreement(ranks, timeout, patience_of() if is_real else 0)

    @contextmanager
    def on(self, intent: Intent, *, waits: bool = False, between: bool = False) -> Iterator[None]:
        """Compare an intent before its collectives; if these fail, raise an error that names the operation.

        Args:
            intent: The next operation.
            waits: True to wait for all ranks even if the same operation followed before.
            between: True after the backwards of a step and before the next forward.

        Raises:
            RanksDisagreeError: Another rank would do something else, has ended, or did not arrive in time.
        """
        if not self.patience:
            yield
            return
        notes = self.confirm(intent, waits=waits, between=between)
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            self._forget()
            wrong = self._why_lost(notes)
            raise RanksDisagreeError(f"{wrong}. {_advice(wrong)}") from error

    def confirm(self, intent: Intent, *, waits: bool = False, between: bool = False) -> Notes:
        """Compare an intent with those of the other ranks, like `on`; return the notes of all ranks."""
        notes = self._notes = self._notes or Notes.of(self.ranks)
        before, phase = notes.own, _BETWEEN if between else max(running_backward(), _FORWARD)
        waits = waits or phase != self._phase or self._follows.get(self._last) != intent
        self._phase = phase
        note = before.followed_by(intent, waits=waits)
        notes.write(note)
        if waits:
            wrong, absent = self._compare(notes, intent)
            if absent:  # a rank that comes later finds no trace of this intent
                notes.write(before)
            elif wrong:
                notes.write(replace(note, failed=note.number, wrong=wrong))
                self._forget()
            if wrong:
                raise RanksDisagreeError(f"{wrong}. {_advice(wrong)}")
            self._follows[self._last] = intent
        self._last = (*self._last, intent)[-_CONTEXT:]
        return notes

    def _forget(self) -> None:
        """Forget the learned sequence of operations after an error."""
        self._last = ()
        self._follows.clear()
        if self._notes is not None:
            self._notes.own = replace(self._notes.own, history=())

    def _compare(self, notes: Notes, intent: Intent) -> tuple[str, list[int]]:
        """Return a description of the difference, empty if there is none; and the ranks that did not arrive in time."""
        absent, found = [rank for rank in self.ranks if rank != notes.rank], [""]
        mine, number = f"rank {notes.rank} {intent}", notes.own.number

        def come() -> bool:
            for rank, note in notes.read(absent).items():
                if note.failed == number:
                    found[0] = note.wrong
                elif notes.own.differs_at(note):
                    pair = sorted([(notes.rank, intent), (rank, note.intent)], key=lambda each: each[0])
                    found[0] = f"{notes.describe(dict(pair))}: they diverge here"
                elif note.number >= number:
                    absent.remove(rank)
            return bool(found[0]) or not absent

        limit = self.patience if intent.outside else self.timeout
        try:
            why = notes.presence.wait(come, absent, seconds=limit, slow=(_SLOW, lambda: self._log_wait(notes, absent)))
        except dist.DistNetworkError:
            return f"{mine}, and the process that hosts the ranks' store has ended", []
        if not why:
            return found[0], []
        if "ended" in why:
            return f"{mine}, {why}", []
        longer = f"; if they only need more time, raise {VARIABLE} (seconds)" * intent.outside
        return (
            f"{mine}, and ranks {absent} did not reach it within {limit:g} s: they have ended, hang, run "
            f"something else, or wait in a compiled graph{longer}"
        ), absent

    def _log_wait(self, notes: Notes, absent: Sequence[int]) -> None:
        _log.warning(
            "rank %d has waited %g s for ranks %s: it %s. %s",
            *(notes.rank, _SLOW, list(absent), notes.own.intent, self._others(notes)),
        )

    def _why_lost(self, notes: Notes) -> str:
        """Return why a collective failed: the error of another rank, or the last positions of the others."""
        with suppress(RuntimeError):
            found = [note.wrong for note in notes.read(self.ranks).values() if note.failed >= notes.own.number]
            if found:
                return found[0]
        return f"rank {notes.rank} {notes.own.intent}, and lost the other ranks. {self._others(notes)}"

    def _others(self, notes: Notes) -> str:
        """Return a description of the last known positions of the others."""
        with suppress(RuntimeError):
            others = [rank for rank in self.ranks if rank != notes.rank]
            seen = {rank: str(note.intent) for rank, note in notes.read(others).items()}
            seen |= notes.presence.ended(others)
            return "Last seen: " + ", ".join(f"rank {rank} {what}" for rank, what in seen.items())
        return "The store that connects the ranks is gone"


class _Agreements:
    """One agreement per set of ranks, shared by all models, for the lifetime of the process group."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[weakref.ref[dist.ProcessGroup], EagerAgreement]] = {}

    def over(self, mesh: DeviceMesh, ranks: tuple[int, ...]) -> EagerAgreement:
        world = dist.group.WORLD
        assert world is not None
        known = self._known.get(ranks)
        if known is None or known[0]() is not world:
            known = self._known[ranks] = (weakref.ref(world), EagerAgreement.over(mesh, ranks))
        return known[1]

    def known(self) -> list[EagerAgreement]:
        """Return the agreements of the current process group."""
        return [agreement for world, agreement in self._known.values() if world() is dist.group.WORLD]


eager_agreements = _Agreements()


def compare_checkpoint(call: str, ranks: list[int]) -> None:
    """Compare a call of `torch.distributed.checkpoint`, by the ranks that have partitioned models together."""
    for agreement in sorted(eager_agreements.known(), key=lambda each: each.ranks):
        if agreement.models and agreement.patience and set(agreement.ranks) <= set(ranks):
            agreement.confirm(Intent(f"calls torch.distributed.checkpoint.{call}", outside=True), waits=True)


def _advice(wrong: str) -> str:
    if is_running("generate"):
        return _SYNCED
    if re.search(r"(save|load)_checkpoint|distributed\.checkpoint", wrong):
        return _SAVE_EVERYWHERE
    if "outside a forward" in wrong:
        return _READ_EVERYWHERE
    if not re.search(r"rank \d+ steps ", wrong):
        return _SAME_PARTS
    return _SAME_BACKWARDS if "backward" in wrong else _SAME_STEPS


def is_running(function: str | CodeType) -> bool:
    """Return True if a function is being called, given by its name or its code."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is function or frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False
