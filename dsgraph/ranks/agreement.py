"""Agreement of ranks before they communicate: they compare their next action, and raise together instead of hanging."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from dsgraph.compat.process_groups import group_timeout
from dsgraph.inductor_ext import backend_name, resolve_group
from dsgraph.utils.errors import RanksDisagreeError

from .eager_agreement import EagerAgreement, eager_agreements
from .mesh import axis_group, mesh_ranks, shard_dim
from .presence import Presence, presences
from .rank_notes import Intent

_Known = TypeVar("_Known")
_SAME_MODEL = "Every rank must build the same model with the same options"


@dataclass
class Agreement:
    """A place where the ranks of a mesh compare lists of lines.

    It communicates through the store of the process group, not through the group, so that it can neither be mixed up
    with running collectives nor hang longer than `timeout`. `dist.all_gather_object` is a collective of the group,
    needs a GPU under NCCL, and does not name absent ranks; `dist.monitored_barrier` does, but supports only gloo and
    carries no values; the `synchronize` of torch's elastic agent involves all ranks of a store, not those of a mesh.

    Attributes:
        ranks: Global ranks that take part.
        timeout: Longest wait for the slowest of them.
        agreed: Hashes that all of them have confirmed.
        runs: Checks that all ranks reach this point, and not another collective; None if the other ranks are fake.
    """

    ranks: tuple[int, ...]
    timeout: timedelta
    agreed: set[str] = field(default_factory=set)
    runs: EagerAgreement | None = None
    _known: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def over(mesh: DeviceMesh) -> Agreement:
        """Return an agreement of all ranks of a mesh; of this rank alone if the others are not real."""
        group = axis_group(mesh, shard_dim(mesh))
        if backend_name(group, mesh.device_type) == "fake":
            return Agreement((dist.get_rank(),), timedelta())
        ranks = tuple(mesh_ranks(mesh))
        runs = eager_agreements.over(mesh, tuple(sorted(ranks)))
        return Agreement(ranks, group_timeout(group, mesh.device_type), runs=runs)

    @staticmethod
    def of(group: str, device_type: str) -> Agreement:
        """Return an agreement of the ranks of a process group, given by its name."""
        own = resolve_group(group)
        return Agreement(tuple(dist.get_process_group_ranks(own)), group_timeout(own, device_type))

    def knows(self, lines: Sequence[str]) -> bool:
        """Return whether exactly these lines were agreed on before."""
        return _digest(lines) in self.agreed

    def announce(self, intent: Intent, lines: Sequence[str]) -> None:
        """Compare an intent with those of the other ranks, the first time that it has these lines.

        Args:
            intent: What this rank is about to do.
            lines: Description of the intent; later calls with the same lines do nothing.

        Raises:
            RanksDisagreeError: Another rank does something else, has ended, or did not respond in time.
        """
        digest = _digest([str(intent.does), *lines])
        if digest not in self.agreed:
            self._come(intent)
            self.agreed.add(digest)

    def _come(self, intent: Intent) -> None:
        if self.runs is not None and self.runs.patience:
            self.runs.confirm(intent, waits=True)

    def confirm(
        self, would: str, lines: Sequence[str] | None, *, steps: Sequence[str] = (), advice: str = _SAME_MODEL
    ) -> None:
        """Compare `lines` with those of all other ranks.

        Args:
            would: What the ranks would do if they differ, for the message: "run different collectives".
            lines: The actions of this rank, in order; None if they are unknown (a cached graph), which agrees with all.
            steps: The steps that led to the lines; if lines differ, the first step that differs is named as well.
            advice: What to do if lines differ.

        Raises:
            RanksDisagreeError: On every rank, naming the first rank that differs and its first differing line, or the
                ranks that did not arrive in time.
        """
        if len(self.ranks) > 1:
            self._compare(would, lines, steps, advice)
        if lines is not None:
            self.agreed.add(_digest(lines))

    def exchange(self, what: str, text: str) -> dict[int, str]:
        """Return every rank's `text`, by rank. All ranks call it.

        Args:
            what: What is exchanged, for the message: "how a pass did".
            text: The text of this rank.

        Raises:
            RanksDisagreeError: A rank did not arrive in time.
        """
        if len(self.ranks) == 1:
            return {self.ranks[0]: text}
        self._come(Intent(f"waits until all ranks say {what}"))
        presence = presences.now()
        store, rank = presence.store, presence.rank
        prefix = self._meeting(store, rank)
        store.set(f"{prefix}/text/{rank}", text)
        keys = {other: f"{prefix}/text/{other}" for other in self.ranks}
        absence = self._absence(presence, keys, f"all ranks say {what}")
        if absence:
            raise RanksDisagreeError(absence)
        return {other: store.get(key).decode() for other, key in keys.items()}

    def remember(self, key: str, make: Callable[[], _Known]) -> _Known:
        """Return the result of `make` at the first call with `key`.

        All ranks use the same keys in the same order.

        Args:
            key: Name of the value.
            make: Computes it, together with the other ranks.
        """
        if key not in self._known:
            self._known[key] = make()
        found: _Known = self._known[key]
        return found

    def least_spare(self, lines: Sequence[str], own: Callable[[], int | None]) -> int | None:
        """Return the least spare memory of any rank when these lines were first compiled.

        Later batches may leave more or less; a rank that compiles for one of them compiles alone, and must get the same
        collectives as the others.

        Args:
            lines: Description of the compile, equal on all ranks.
            own: Returns the bytes of this rank; None if unknown, -1 to refuse, which is not remembered.

        Returns:
            Bytes; None if a rank does not know, -1 if one refuses.

        Raises:
            RanksDisagreeError: A rank did not arrive in time.
        """

        def ask() -> int | None:
            said = self.exchange("how much memory they have to spare", json.dumps(own())).values()
            known = [json.loads(each) for each in said]
            return None if None in known else min(known)

        found = self.remember(key := f"spare {_digest(lines)}", ask)
        return self._known.pop(key) if found == -1 else found  # all refuse together, and a smaller batch may fit

    def least_memory(self, own: Callable[[], int]) -> int:
        """Return the least memory that any rank has for a step, as it was when they first compiled.

        Args:
            own: Returns the bytes of this rank.

        Raises:
            RanksDisagreeError: A rank did not arrive in time.
        """
        return self.remember(
            "memory", lambda: min(int(text) for text in self.exchange("how much memory they have", str(own())).values())
        )

    def _meeting(self, store: dist.Store, rank: int) -> str:
        """Return the prefix of the keys of the ranks' next meeting.

        Each rank counts its own: the n-th meets the n-th.
        """
        members = hashlib.sha256(json.dumps(self.ranks).encode()).hexdigest()[:12]
        return f"dsgraph/{members}/{store.add(f'dsgraph/{members}/meetings/{rank}', 1)}"

    def _compare(self, would: str, lines: Sequence[str] | None, steps: Sequence[str], advice: str) -> None:
        self._come(Intent(f"compares whether ranks {would}"))
        presence = presences.now()
        store, rank = presence.store, presence.rank
        prefix = self._meeting(store, rank)
        store.set(f"{prefix}/lines/{rank}", json.dumps(list(lines or ())))
        store.set(f"{prefix}/steps/{rank}", json.dumps(list(steps)))
        store.set(f"{prefix}/digest/{rank}", "" if lines is None else _digest(lines))
        leader = self.ranks[0]
        if rank == leader:
            store.set(f"{prefix}/verdict", self._judge(presence, prefix, would, advice))
        self._wait(presence, f"{prefix}/verdict", would)
        verdict = store.get(f"{prefix}/verdict").decode()
        if verdict:
            raise RanksDisagreeError(verdict)

    def _judge(self, presence: Presence, prefix: str, would: str, advice: str) -> str:
        """Return a description of the disagreement, empty if all agree. The leader calls it."""
        store, keys = presence.store, {rank: f"{prefix}/digest/{rank}" for rank in self.ranks}
        absence = self._absence(presence, keys, f"the others compare whether they {would}")
        if absence:
            return absence
        digests = {rank: store.get(key) for rank, key in keys.items()}
        known = [rank for rank in self.ranks if digests[rank]]
        for rank in known:
            if digests[rank] != digests[known[0]]:
                pair = (known[0], rank)
                lines = [_lines(store, f"{prefix}/lines", which) for which in pair]
                steps = [_lines(store, f"{prefix}/steps", which) for which in pair]
                return _difference(would, *pair, *lines) + advice + _first_step_apart(*pair, *steps)
        return ""

    def _absence(self, presence: Presence, keys: Mapping[int, str], where: str) -> str:
        """Wait for the ranks to set their keys; return a description of absent ranks, empty if all have set theirs."""
        absent = list(keys)

        def come() -> bool:
            absent[:] = [rank for rank in absent if not presence.store.check([keys[rank]])]
            return not absent

        why = presence.wait(come, absent, seconds=self.timeout.total_seconds())
        if not why:
            return ""
        if "ended" in why:
            return f"{why}, and does not come to where {where}"
        return (
            f"ranks {absent} did not come within {self.timeout.total_seconds():.0f} s to where {where}: "
            "they have died, hang, or run another program"
        )

    def _wait(self, presence: Presence, verdict: str, would: str) -> None:
        leader, seconds = self.ranks[0], self.timeout.total_seconds()
        # The leader gives up first, and says why.
        why = presence.wait(lambda: presence.store.check([verdict]), [leader], seconds=seconds + 10)
        if why:
            raise RanksDisagreeError(
                f"waited for rank {leader} to compare what the ranks do ({would}?): {why}; it has died, hangs, or runs "
                "another program"
            )


class Agreements:
    """The agreements of all meshes, each for as long as the process group lives."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[weakref.ref[dist.ProcessGroup], Agreement]] = {}

    def over(self, mesh: DeviceMesh) -> Agreement:
        """Return the agreement of this mesh's ranks."""
        fresh, world = Agreement.over(mesh), dist.group.WORLD
        assert world is not None
        known = self._known.get(fresh.ranks)
        if known is not None and known[0]() is world:
            return known[1]
        self._known[fresh.ranks] = (weakref.ref(world), fresh)
        return fresh


def _lines(store: dist.Store, prefix: str, rank: int) -> list[str]:
    lines: list[str] = json.loads(store.get(f"{prefix}/{rank}"))
    return lines


def _difference(would: str, first: int, other: int, mine: list[str], theirs: list[str]) -> str:
    index, a, b = _first_apart(mine, theirs)
    return (
        f"ranks {first} and {other} would {would}. First difference, entry {index} of {len(mine)} and {len(theirs)}: "
        f"rank {first} has [{a}], rank {other} has [{b}]. "
    )


def _first_step_apart(first: int, other: int, mine: list[str], theirs: list[str]) -> str:
    if mine == theirs:
        return ""
    _, a, b = _first_apart(mine, theirs)
    return f". They diverge here: rank {first} has [{a}], rank {other} has [{b}]"


def _first_apart(mine: list[str], theirs: list[str]) -> tuple[int, str, str]:
    """Return the number of the first entry that differs, and both entries."""
    index = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))
    a, b = (lines[index] if index < len(lines) else "nothing more" for lines in (mine, theirs))
    return index, a, b


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()
