"""Judges how a program ended: with the results of one process, with an error that names the cause, or otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsgraph.utils import errors
from tests.trials.programs.play import Note, OwnError

RIGHT, NAMED = "right numbers", "named error"
# What a program must not end in, the worst last.
FAULTS = (
    "refused",
    "gloo's words",
    "late error",
    "unnamed error",
    "wrong before error",
    "wrong numbers",
    "crash",
    "hang",
)
OUTCOMES = (RIGHT, NAMED, *FAULTS)

_OF_THE_TRANSPORT = re.compile(
    r"gloo|SIGABRT|Connection (closed|reset|refused)|Timed out|timed out|Broken pipe|NCCL", re.I
)
_OURS = tuple(each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception))


@dataclass(frozen=True)
class Failure:
    """The error by which a rank's program ended.

    Attributes:
        kind: Name of its class.
        text: What it said.
        is_ours: Whether dsgraph raised it, itself or through Dynamo.
        is_own: Whether the program of this rank raised it.
        seconds: That the operation took that raised, without those in which a rank computed.
    """

    kind: str
    text: str
    is_ours: bool
    is_own: bool
    seconds: float

    @staticmethod
    def of(error: BaseException, seconds: float) -> Failure:
        ours = next((each for each in _chain(error) if isinstance(each, _OURS)), None)
        said = ours or error
        return Failure(type(said).__name__, str(said), ours is not None, isinstance(error, OwnError), seconds)


@dataclass(frozen=True)
class Ending:
    """The end of one rank.

    Attributes:
        at: What it did last.
        notes: What it noted before.
        failure: The error by which it ended, if it did.
        exit_code: Exit code of the process; None if it was killed because it hung.
        has_ended: Whether it came to its end, by an error or without.
    """

    at: str
    notes: Sequence[Note] = ()
    failure: Failure | None = None
    exit_code: int | None = 0
    has_ended: bool = False

    def after(self, idle: float) -> Ending:
        """The same, where nothing was computed in `idle` seconds of those that the operation took."""
        if self.failure is None:
            return self
        return replace(self, failure=replace(self.failure, seconds=min(idle, self.failure.seconds)))


@dataclass
class Verdict:
    """How a program ended.

    Attributes:
        outcome: One of `OUTCOMES`: the worst of all ranks.
        said: What each rank ended in, in words.
    """

    outcome: str = RIGHT
    said: list[str] = field(default_factory=list)

    def add(self, outcome: str, text: str) -> None:
        self.outcome = max(self.outcome, outcome, key=OUTCOMES.index)
        self.said.append(f"{outcome}: {text}")


def judge(
    endings: Sequence[Ending],
    expected: Sequence[Mapping[str, Tensor]],
    *,
    limit: float = 10.0,
    must_be_right: bool = False,
) -> Verdict:
    """Return how a program ended.

    Args:
        endings: How each rank ended.
        expected: The notes of each rank in one process.
        limit: How long a rank may take to raise an error, seconds.
        must_be_right: Whether an error is a fault, even one that names its cause.
    """
    verdict = Verdict()
    names = "|".join(re.escape(name.partition(", ")[2]) for name in expected[0] if name.endswith((".weight", ".bias")))
    named = re.compile(rf"\branks? \[?\d|{names}" if names else r"\branks? \[?\d")
    stopped = [_step(ending.at) for ending in endings if ending.failure and not ending.failure.is_own]
    is_stopped = bool(stopped)
    for rank, (ending, right) in enumerate(zip(endings, expected, strict=True)):
        where = f"rank {rank} at {ending.at}"
        notes = ending.notes
        if is_stopped:
            notes = _used(notes)
        if ending.failure is not None and is_stopped:  # its step may be later than that of ranks stopped before
            notes = [note for note in notes if _step(note[0]) < min(stopped)]
        difference = _difference(notes, right, rank, len(endings))
        if difference:
            verdict.add("wrong before error" if is_stopped else "wrong numbers", f"rank {rank}: {difference}")
        failure = ending.failure
        if failure is None:
            _judge_end(verdict, ending, right, where)
        elif not failure.is_own:
            said = f"{where} after {failure.seconds:.1f} s: {failure.kind}: {failure.text}"
            verdict.add(_outcome_of(failure, named, limit=limit, must_be_right=must_be_right), said)
    return verdict


def _judge_end(verdict: Verdict, ending: Ending, right: Mapping[str, Tensor], where: str) -> None:
    if ending.exit_code is None:
        verdict.add("hang", where)
    elif ending.exit_code:
        verdict.add("crash", f"{where}: exit code {ending.exit_code}")
    elif len(ending.notes) < len(right):
        verdict.add("wrong numbers", f"{where}: noted {len(ending.notes)} values, not {len(right)}")


def _outcome_of(failure: Failure, named: re.Pattern[str], *, limit: float, must_be_right: bool) -> str:
    if not failure.is_ours or not named.search(failure.text):
        is_transport = _OF_THE_TRANSPORT.search(failure.text)
        return "gloo's words" if is_transport and not failure.is_ours else "unnamed error"
    if _OF_THE_TRANSPORT.search(failure.text):
        return "gloo's words"
    if failure.seconds > limit:
        return "late error"
    return "refused" if must_be_right else NAMED


def _step(where: str) -> int:
    found = re.match(r"step (\d+)", where)
    return int(found[1]) if found else -1


def _used(notes: Sequence[Note]) -> Sequence[Note]:
    """The notes up to the last loss: no forward has used the parameters that were noted later."""
    last = max((number for number, (name, *_) in enumerate(notes) if name.endswith("loss")), default=-1)
    return notes[: last + 1]


def _difference(notes: Sequence[Note], right: Mapping[str, Tensor], rank: int, world: int) -> str:
    for name, array, is_rows in notes:
        value = torch.as_tensor(array)
        if name not in right:
            return f"{name} is not there in one process"
        wanted = right[name]
        if is_rows:
            chunks = wanted.chunk(world)
            wanted = chunks[rank] if rank < len(chunks) else wanted[:0]
        if value.shape != wanted.shape or not torch.allclose(value, wanted, rtol=1e-4, atol=1e-5):
            apart = (value - wanted).abs().max().item() if value.shape == wanted.shape else "shape"
            return f"{name} differs by {apart} from one process"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
