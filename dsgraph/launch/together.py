"""Runs the commands of several hosts, shows their output, and ends all when one fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from dsgraph.utils.errors import LaunchError

from .commands import HostCommand
from .processes import describe_exit, ended_by_signals, undisturbed

# Seconds that hosts get to end their ranks when asked to; `on_host` takes up to seven on a machine that is not busy. A
# host that is killed earlier leaves its ranks running.
_PATIENCE = 30.0
# Seconds to wait for the rest of a host's output after the host has ended.
_FLUSH = 2.0
_POLL = 0.05  # seconds
# A carriage return that comes last may be half of a line's end.
_LINE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?=[^\n]))")


def run_together(commands: Sequence[HostCommand], *, quiet: bool = False) -> int:
    """Run the commands until all have ended or one has failed, which ends the others.

    Their output is passed through, with the host's name before each line if there are several. They end with this
    process: after Ctrl-C and SIGTERM in good order, otherwise because their standard input closes.

    Args:
        commands: One for each host.
        quiet: Write their output to stderr, because stdout is for something else.

    Returns:
        0, or the exit code of the host whose failure was seen first.

    Raises:
        LaunchError: A program cannot be started.
    """
    sys.stdout.flush()
    running: list[_Running] = []
    with ended_by_signals():
        try:
            for command in commands:
                running.append(_Running(command, is_named=len(commands) > 1, quiet=quiet))
            return _watch(running)
        finally:
            _end(running)


class _Running:
    """A running command, and the threads that pass its output through."""

    def __init__(self, command: HostCommand, *, is_named: bool, quiet: bool) -> None:
        self.host = command.host
        output = sys.stderr if quiet else sys.stdout
        try:
            # In a session of its own: Ctrl-C is for this process, which ends the hosts in good order.
            self.process = subprocess.Popen(
                command.command,
                env={**os.environ, **command.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if is_named else output,
                stderr=subprocess.PIPE if is_named else sys.stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{command.command[0]} cannot be started for {self.host}: {error.strerror}") from None
        pairs = [(self.process.stdout, output), (self.process.stderr, sys.stderr)]
        self._relays = [
            threading.Thread(target=_relay, args=(source, sink.buffer, self.host), daemon=True)
            for source, sink in pairs
            if source is not None
        ]
        for relay in self._relays:
            relay.start()

    def release(self) -> None:
        """Close the leash, upon which the command ends its ranks."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait until the command has ended, and kill it at the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            print(f"dsgraph: {self.host} did not end in time; look for processes there", file=sys.stderr)
        self.flush()

    def flush(self) -> None:
        """Wait until all output of an ended command is shown."""
        for relay in self._relays:
            relay.join(_FLUSH)


def _watch(running: Sequence[_Running]) -> int:
    while True:
        codes = [each.process.poll() for each in running]
        for each, code in zip(running, codes, strict=True):
            if code:
                each.flush()
                if len(running) > 1:
                    said = f"dsgraph: {each.host} failed ({describe_exit(code)}); the other hosts are ended"
                    print(said, file=sys.stderr, flush=True)
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(_POLL)


def _end(running: Sequence[_Running]) -> None:
    with undisturbed():
        for each in running:
            each.release()
        deadline = time.monotonic() + _PATIENCE
        for each in running:
            each.end(deadline)


def _relay(source: IO[bytes], sink: IO[bytes], host: str) -> None:
    """Pass lines on, with the host before each. A carriage return ends a line as well: progress bars write it."""
    prefix, rest = f"[{host}] ".encode(), b""
    try:
        while chunk := os.read(source.fileno(), 65536):
            lines = _LINE.findall(rest + chunk)
            rest = (rest + chunk)[sum(map(len, lines)) :]
            if lines:
                sink.write(b"".join(prefix + line for line in lines))
                sink.flush()
        if rest:
            sink.write(prefix + rest + b"\n")
            sink.flush()
    except (OSError, ValueError):
        source.close()  # nobody reads what they print: they are told as a program is whose pipe has closed
