"""Processes that are started together, answer through pipes, and end together whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_MARK = "DSGRAPH_LAUNCH"
# How long the processes get to end by themselves after Ctrl-C, and after SIGTERM, seconds.
_PATIENCE = (1.0, 5.0)


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str], *, quiet: bool = False, stdin: int | None = None
) -> int:
    """Run a command, pass its output through, and return its exit code; it ends with this process.

    Args:
        command: Program and arguments.
        environment: All of its variables.
        quiet: Write its output to stderr, because stdout is for something else.
        stdin: As for `subprocess`; None for that of this process.
    """
    mark = uuid.uuid4().hex
    marked = {**environment, _MARK: mark}
    sys.stdout.flush()
    with ended_by_signals():
        child = subprocess.Popen(command, env=marked, stdin=stdin, stdout=sys.stderr if quiet else None)
        try:
            return child.wait()
        except BaseException:
            _end(child, mark)
            raise


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process like Ctrl-C does: by an exception, after which it can clean up."""

    def stop(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore further Ctrl-C, SIGTERM or SIGHUP during the block, which cleans up after the first one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_exit(code: int) -> str:
    """Return how a program ended, in words: "exit code 3", "killed by SIGKILL"."""
    number = -code if code < 0 else code - 128
    with suppress(ValueError):
        if code < 0 or code > 128:
            return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}"


@contextmanager
def environment_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the environment in which processes start, and restore it at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Answers:
    """The answers of processes, by their number.

    Attributes:
        values: Results of those that did not fail.
        errors: Tracebacks of those that failed.
        dead: Those that closed their pipe without an answer.
        silent: Those that have not answered in time.
    """

    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)

    @property
    def are_complete(self) -> bool:
        """True if all returned."""
        return not (self.errors or self.dead or self.silent)


def collect(pipes: Sequence[Connection], *, limit: float, grace: float) -> Answers:
    """Wait for one answer of each process: a pair, True and a value, or False and a traceback.

    Args:
        pipes: Pipes to the processes.
        limit: Longest time until the next answer, seconds.
        grace: The limit once one has failed, which the others should notice.
    """
    answers = Answers()
    waiting = {pipe: number for number, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=limit if answers.are_complete else min(limit, grace))
        if not ready:
            answers.silent = sorted(waiting.values())
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            number = waiting.pop(pipe)
            try:
                is_good, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                answers.dead.append(number)
                continue
            (answers.values if is_good else answers.errors)[number] = value
    return answers


def _end(child: subprocess.Popen[bytes], mark: str) -> None:
    """End a command and all processes that it has started."""
    with undisturbed():
        for patience, then in zip(_PATIENCE, (child.terminate, child.kill), strict=True):
            # First without a word: a terminal has told the script of Ctrl-C already, and torchrun is ending its ranks.
            with suppress(subprocess.TimeoutExpired):
                child.wait(patience)
                break
            then()
        child.wait()
        _kill_marked(mark)


def _kill_marked(mark: str) -> None:
    """Kill all processes with the mark in their environment: ranks have sessions of their own. Linux only."""
    wanted = f"{_MARK}={mark}".encode()
    for _ in range(20):
        left = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    left.append(int(folder.name))
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.05)
