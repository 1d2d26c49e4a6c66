"""Processes that stay alive and do what they are asked: ranks of tests and of benchmarks."""

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
    """Processes on this machine, each of which makes one object and then calls its methods on request.

    A process that waits does so on a pipe, and uses no processor time. It leaves when this process is gone.
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
        """Says what the processes will be; `start` starts them.

        Args:
            make: Called with a process's number and `args`, in the process. Importable by name, such as a class.
            *args: Picklable.
            method: How processes are started, see `multiprocessing`.
            preload: Modules that "forkserver" imports once for all of them.
            environ: Environment variables that must be set before a process imports anything.
            logs: Folder that receives what they print, a file each; by default they print where this process does.
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
        """Has at least `count` of them alive; where one has died, all start anew.

        Args:
            count: How many.
            limit: How long `make` may take, seconds.
            grace: The same once it has failed in one of them.

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
        """Calls a method of the objects of the first `count` processes.

        Args:
            method: Its name.
            *args: Picklable.
            count: How many are called.
            limit: How long to wait for the next answer, seconds.
            grace: The same once one has failed, which the others should notice.
        """
        pipes = self._pipes[:count]
        for pipe in pipes:
            with suppress(BrokenPipeError):  # it died, as `collect` will see
                pipe.send((method, args))
        return collect(pipes, limit=limit, grace=grace)

    def last_words(self, number: int, *, patience: float) -> str:
        """How a process died, and what it printed last."""
        process, log = self._processes[number], self._log(number)
        process.join(patience)
        printed = log.read_text(errors="replace").splitlines() if log is not None and log.is_file() else []
        return "\n".join([f"died with exit code {process.exitcode}; it had printed:", *printed[-20:]])

    def dismiss(self) -> None:
        """Lets them go without waiting: of several pools, dismiss all before you stop the first."""
        for pipe in self._pipes:
            pipe.close()  # at which a process that waits leaves

    def stop(self, *, patience: float = 0) -> None:
        """Ends them; what has not left after `patience` seconds is killed."""
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
            return  # whoever asks is gone
        try:
            pipe.send((True, getattr(served, method)(*values)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
