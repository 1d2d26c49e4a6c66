"""A trial: what a user writes, run on two ranks and in one process, and what must come of it."""

from __future__ import annotations

import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.trials.user import User, Way

WAYS = (Way(3, True), Way(1, True), Way(3, False), Way(0, False))
COMPILED = tuple(way for way in WAYS if way.compiles)
UNCOMPILED = tuple(way for way in WAYS if not way.compiles)
# How long one way may take on a rank, seconds.
LIMIT = 120

Script = Callable[[User], None]


@dataclass(frozen=True)
class Trial:
    """A script and its outcome.

    Attributes:
        name: Of the script.
        title: What the user does.
        room: The file in which it stands.
        script: What the user writes.
        refused: What the error says; empty: the script gives what it gives in one process.
        refused_in: The ways in which it is refused; in the others it is right.
        ways: The ways in which it makes sense.
        rtol: Relative tolerance; with `exact`, none.
        atol: Absolute tolerance.
        needs: Packages besides those that tests always need.
        was: What it did before it was fixed; empty if it was right the first time.
    """

    name: str
    title: str
    room: str
    script: Script
    refused: str = ""
    refused_in: Sequence[Way] = WAYS
    ways: Sequence[Way] = WAYS
    rtol: float = 1e-5
    atol: float = 1e-6
    needs: tuple[str, ...] = ()
    was: str = ""

    @property
    def outcome(self) -> str:
        if not self.refused:
            return "as in one process"
        says = f'refused: "{self.says}"'
        if all(way in self.refused_in for way in self.ways):
            return says
        return f"{says}, {self._where}; else as in one process"

    @property
    def says(self) -> str:
        return re.sub(r"\\(.)", r"\1", self.refused).replace(".*", " ... ")

    @property
    def _where(self) -> str:
        refused = set(self.ways) & set(self.refused_in)
        if refused == set(self.ways) & set(COMPILED):
            return "compiled"
        if refused == set(self.ways) & set(UNCOMPILED):
            return "uncompiled"
        if refused == {way for way in self.ways if way.stage}:
            return "in stages 1 to 3"
        return "with " + " and ".join(map(str, refused))


TRIALS: dict[str, Trial] = {}


def trial(title: str, **more: Any) -> Callable[[Script], Script]:
    """Lists a script as a trial."""

    def add(script: Script) -> Script:
        room = script.__module__.rpartition(".")[2]
        assert script.__name__ not in TRIALS, script.__name__
        TRIALS[script.__name__] = Trial(script.__name__, title, room, script, **more)
        return script

    return add


def run(name: str) -> list[str]:
    """Runs a trial on this rank in all ways, and says what was wrong."""
    tried = TRIALS[name]
    expected = _in_one_process(tried)
    wrong = []
    for way in tried.ways:
        problem = _run_in(tried, way, expected)
        if problem:
            wrong.append(f"{way}: {problem}")
            break
    return wrong


def _in_one_process(tried: Trial) -> list[tuple[str, torch.Tensor]]:
    user = User(None)
    with _clean():
        tried.script(user)
    assert user.notes or tried.refused, "nothing is compared"
    return user.notes


def _run_in(tried: Trial, way: Way, expected: list[tuple[str, torch.Tensor]]) -> str:
    user, said = User(way), ""
    with _clean():
        try:
            tried.script(user)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
    is_refused = bool(tried.refused) and way in tried.refused_in
    if is_refused:
        if not said:
            return "was not refused" + _differences(tried, user.notes, expected)
        return "" if re.search(tried.refused, said, re.DOTALL) else f"raised other words: {trace}"
    return trace if said else _differences(tried, user.notes, expected)


def _differences(tried: Trial, found: Sequence[tuple[str, Any]], expected: Sequence[tuple[str, Any]]) -> str:
    names = [name for name, _ in found], [name for name, _ in expected]
    if names[0] != names[1]:
        return f"noted {names[0]} in place of {names[1]}"
    for number, ((name, mine), (_, theirs)) in enumerate(zip(found, expected, strict=True)):
        try:
            torch.testing.assert_close(mine, theirs, rtol=tried.rtol, atol=tried.atol, equal_nan=True)
        except AssertionError as error:
            return f"note {number}, {name}, rank {dist.get_rank()}: {error}"
    return ""


@contextmanager
def _clean() -> Iterator[None]:
    """A process as the script would find it, and a limit to its time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    previous = signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"the script hung: it took more than {LIMIT} s")
