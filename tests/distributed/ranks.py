"""Ranks for tests: processes that stay alive from test to test, so that each test does not start torch anew."""

from __future__ import annotations

import faulthandler
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# How long one call may take before its ranks are killed, seconds.
CALL_LIMIT = 240


# Imported once, by the process from which all ranks are forked, and not by each of them.
_PRELOADED = ["torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor", "dsgraph"]


class Processes:
    """The processes that play ranks, as many as the largest group so far has needed."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def start(self, count: int) -> list[Connection]:
        """Pipes to the first `count` of them, all alive."""
        if not all(process.is_alive() for process in self.processes):
            self.stop()
        while len(self.processes) < count:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)
        return self.pipes[:count]

    def stop(self) -> None:
        """Kills them; the next call starts new ones."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


class Ranks:
    """`world` gloo ranks on this machine."""

    def __init__(self, world: int, processes: Processes) -> None:
        self.world = world
        self._processes = processes

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 60, **kwargs: Any) -> list[Any]:
        """Calls `function(*args, **kwargs)` on every rank, in a fresh process group; returns what each rank returned.

        Raises:
            AssertionError: A rank raised; the message holds every rank's traceback.
        """
        pipes = self._processes.start(self.world)
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(pipes):
                pipe.send((function, args, kwargs, rank, self.world, str(Path(folder) / "store"), timeout_s))
            answers = _collect(pipes)
        errors = {rank: value for rank, (ok, value) in answers.items() if not ok}
        if errors or len(answers) < self.world:
            self._processes.stop()  # ranks that failed or hang may have left the group in any state
            missing = [rank for rank in range(self.world) if rank not in answers]
            lost = f"ranks {missing} did not answer in {CALL_LIMIT} s or died\n" if missing else ""
            raise AssertionError(lost + "\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        return [answers[rank][1] for rank in range(self.world)]


def _collect(pipes: list[Connection]) -> dict[int, tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    limit = float(CALL_LIMIT)
    while waiting:
        ready = wait(list(waiting), timeout=limit)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                continue  # it died
        if any(not ok for ok, _ in answers.values()):
            limit = 45.0  # the others should notice soon
    return answers


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    while True:
        try:
            function, args, kwargs, rank, world, store, timeout_s = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(CALL_LIMIT - 10)  # where it hangs, to stderr, before it is killed
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
            torch._dynamo.reset()
            result = function(*args, **kwargs)
            dist.barrier()
            dist.destroy_process_group()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
