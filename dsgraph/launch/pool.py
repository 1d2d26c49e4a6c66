"""A pool of processes that stay alive and run calls: ranks of tests and of benchmarks."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .processes import Answers, collect, environment_set


class Pool:
    """Processes on this machine, each with one object whose methods are called on request.

    A waiting process waits on a pipe, and uses no processor time. It ends when this process has ended.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *args: Any,
        method: str = "spawn",
        preload: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        """Define the processes; `start` starts them.

        Args:
            make: Makes the object; called with a process's number and `args`, in the process. Importable by name, such
                as a class.
            *args: Picklable arguments.
            method: The start method, see `multiprocessing`.
            preload: Modules that "forkserver" imports once for all of them.
            environ: Environment variables that must be set before a process imports anything.
            logs: Folder of their output, a file each; by default they print where this process does.
        """
        self._make = (make, args)
        self._context: Any = multiprocessing.get_context(method)
        if preload:
            self._context.set_forkserver_preload(list(preload))
        self._environ = dict(environ or {})
        self._logs = logs
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def start(self, count: int, *, limit: float, grace: float) -> Answers:
        """Start processes until at least `count` are alive; if one has died, restart all.

        Args:
            count: Number of processes.
            limit: Longest time of `make`, seconds.
            grace: Longest time once it has failed in one of them, seconds.

        Returns:
            The answers of those that were started now.
        """
        if not all(process.is_alive() for process in self._processes):
            self.stop()
        old = len(self._pipes)
        with environment_set(self._environ):
            for number in range(old, count):
                here, there = self._context.Pipe()
                process = self._context.Process(
                    target=_serve, args=(there, number, self._log(number), *self._make), daemon=True
                )
                self._pipes.append(here)
                process.start()
                self._processes.append(process)
                there.close()
        return collect(self._pipes[old:], limit=limit, grace=grace)

    def call(self, method: str, *args: Any, count: int, limit: float, grace: float) -> Answers:
        """Call a method of the objects of the first `count` processes.

        Args:
            method: Its name.
            *args: Picklable arguments.
            count: Number of called processes.
            limit: Longest time until the next answer, seconds.
            grace: The limit once one has failed, which the others should notice.
        """
        pipes = self._pipes[:count]
        for pipe in pipes:
            with suppress(BrokenPipeError):  # it died, as `collect` will see
                pipe.send((method, args))
        return collect(pipes, limit=limit, grace=grace)

    def last_words(self, number: int, *, patience: float) -> str:
        """Return how a process died, and its last output."""
        process, log = self._processes[number], self._log(number)
        process.join(patience)
        printed = log.read_text(errors="replace").splitlines() if log is not None and log.is_file() else []
        return "\n".join([f"died with exit code {process.exitcode}; it had printed:", *printed[-20:]])

    def dismiss(self) -> None:
        """Tell the processes to end without waiting: with several pools, dismiss all before you stop the first."""
        for pipe in self._pipes:
            pipe.close()  # at which a process that waits leaves

    def stop(self, *, patience: float = 0) -> None:
        """End the processes; those still alive after `patience` seconds are killed."""
        self.dismiss()
        for process in self._processes:
            if patience:
                process.join(patience)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _log(self, number: int) -> Path | None:
        return None if self._logs is None else self._logs / f"rank{number}.log"


def _serve(pipe: Connection, number: int, log: Path | None, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if log is not None:
        printed = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
    try:
        served = make(number, *args)
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            method, values = pipe.recv()
        except EOFError:
            return  # the caller has ended
        try:
            pipe.send((True, getattr(served, method)(*values)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
