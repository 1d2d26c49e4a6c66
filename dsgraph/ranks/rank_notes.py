"""Notes in which ranks publish their next operation: one key per rank, overwritten each time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from .presence import Presence, presences

# Number of earlier digests in a note: a rank that does not wait may be a few operations further than the others.
_HISTORY = 16


@dataclass(frozen=True)
class Intent:
    """The next operation of a rank that involves other ranks.

    Attributes:
        does: Verb and object, equal on all ranks: "gathers parameter 'layer.weight'".
        outside: True outside any forward and backward.
        digest: Digest of `parameters`.
        parameters: Full names of the parameters that a compiled graph reads, in order.
        place: Source of a compiled graph, for messages: "Net.forward (net.py)".
        step: Number of optimizer steps that the model has made.
    """

    does: str
    outside: bool = False
    digest: str = ""
    parameters: tuple[str, ...] = field(default=(), compare=False, repr=False)
    place: str = field(default="", compare=False)
    step: int = field(default=0, compare=False)

    @staticmethod
    def of_graph(does: str, parameters: Sequence[str], *, place: str, step: int) -> Intent:
        """Return the intent to run a compiled graph that reads these parameters."""
        return Intent(does, digest=_digest(parameters), parameters=tuple(parameters), place=place, step=step)

    def __str__(self) -> str:
        return self.does + f" of {self.place}" * bool(self.place) + " outside a forward" * self.outside


@dataclass(frozen=True)
class Note:
    """The state that a rank publishes.

    Attributes:
        number: Number of intents so far.
        intent: The last intent; it is written without `parameters`.
        history: Digests of all intents up to the last one, up to the one before it, and so on.
        waits: True while the rank waits for the others, so that it will see what they find.
        failed: The number of the last intent on which ranks did not agree; 0 if there is none.
        wrong: Description of the disagreement.
    """

    number: int
    intent: Intent
    history: tuple[str, ...] = ()
    waits: bool = False
    failed: int = 0
    wrong: str = ""

    @staticmethod
    def read(text: bytes) -> Note:
        """Return the note that another rank has written."""
        number, intent, history, waits, failed, wrong = json.loads(text)
        does, outside, digest, place, step = intent
        return Note(number, Intent(does, outside, digest, (), place, step), tuple(history), waits, failed, wrong)

    def written(self) -> str:
        """Return the note as text."""
        intent = self.intent
        fields = [intent.does, intent.outside, intent.digest, intent.place, intent.step]
        return json.dumps([self.number, fields, self.history, self.waits, self.failed, self.wrong])

    def followed_by(self, intent: Intent, *, waits: bool) -> Note:
        """Return the note of the next intent."""
        before = self.history[0] if self.history else ""
        digest = _digest([before, intent.does, str(intent.outside), intent.digest, str(intent.step)])
        history = (digest, *self.history)[:_HISTORY]
        return replace(self, number=self.number + 1, intent=intent, history=history, waits=waits)

    def differs_at(self, other: Note) -> bool:
        """Return True if the rank of `other` had different intents up to the number of this note."""
        behind = other.number - self.number
        return 0 <= behind < len(other.history) and other.history[behind] != self.history[0]


@dataclass(eq=False)
class Notes:
    """The notes of a group of ranks.

    Attributes:
        presence: This rank's presence.
        prefix: Prefix of the keys in the store.
        own: This rank's note.
    """

    presence: Presence
    prefix: str
    own: Note = field(default_factory=lambda: Note(0, Intent("has not begun")))
    _published: set[str] = field(default_factory=set)

    @staticmethod
    def of(ranks: tuple[int, ...]) -> Notes:
        """Return the notes of these ranks."""
        presence = presences.now()
        members = hashlib.sha256(json.dumps(ranks).encode()).hexdigest()[:12]
        # A process group may be created again on the same store: the n-th groups of all ranks belong together.
        number = presence.store.add(f"dsgraph/{members}/eager/{presence.rank}", 1)
        return Notes(presence, f"dsgraph/{members}/eager/{number}")

    @property
    def rank(self) -> int:
        """This rank."""
        return self.presence.rank

    def write(self, note: Note) -> None:
        """Overwrite this rank's note, without waiting."""
        self.own = note
        digest = note.intent.digest
        if digest and digest not in self._published:
            self._published.add(digest)
            self.presence.store.set(f"{self.prefix}/names/{digest}", json.dumps(note.intent.parameters))
        self.presence.store.set(f"{self.prefix}/{self.rank}", note.written())

    def read(self, ranks: Iterable[int]) -> dict[int, Note]:
        """Return the notes of those ranks that have written one."""
        store, keys = self.presence.store, {rank: f"{self.prefix}/{rank}" for rank in ranks}
        return {rank: Note.read(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def describe(self, intents: dict[int, Intent]) -> str:
        """Return the operations of two ranks that differ, with the first differing parameter and the step."""
        names = [self._names(intent) for intent in intents.values()]
        different = (i for i, pair in enumerate(zip(*names, strict=False)) if len(set(pair)) > 1)
        apart = next(different, min(map(len, names)))
        said = []
        for (rank, intent), own in zip(intents.items(), names, strict=True):
            text = f"rank {rank} {intent}"
            if len({intent.digest for intent in intents.values()}) > 1 and own:
                text += f", which reads {own[apart]!r}" if apart < len(own) else ", which reads no further parameter"
                text += f" ({apart + 1} of {len(own)})"
            said.append(text + _after(intent.step))
        return ", ".join(said)

    def _names(self, intent: Intent) -> list[str]:
        key = f"{self.prefix}/names/{intent.digest}"
        if not intent.digest or not self.presence.store.check([key]):
            return []
        found: list[str] = json.loads(self.presence.store.get(key))
        return found


def _after(steps: int) -> str:
    return f", after {steps} optimizer step{'s' * (steps != 1)}" if steps else ""


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()[:16]
