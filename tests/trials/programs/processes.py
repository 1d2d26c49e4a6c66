"""One process a rank, forked from one that has compiled before; it ends as the process of a script does."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dsgraph
from tests.trials.programs.judge import Ending, Failure, Verdict, judge
from tests.trials.programs.play import Net, Rank, Twin
from tests.trials.programs.program import Call, Program, draw

# Time-out of the process group: an error that comes by it is late. Seconds.
TIMEOUT = 20
# Seconds for which all ranks may be idle, and for which a program may run on the busiest machine.
LIMIT = 40
LAST_LIMIT = 400
# Share of a core below which the ranks of a program count as idle: waiting ranks poll the store.
_BUSY = 0.06

_FORK: Any = multiprocessing.get_context("fork")


def warm_up() -> None:
    """Compile once in this process, without other ranks: the processes that are forked begin with full caches."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    program = draw(0)
    for stage in (3, 1):
        model = dsgraph.partition(Net(program), stage=stage, keep_whole_below=0)
        run = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            run(torch.ones(2, program.width), **vars(Call())).sum().backward()
            optimizer.step()
    dist.destroy_process_group()
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


def judge_all(programs: Sequence[Program], *, jobs: int) -> Iterator[tuple[Program, Verdict, float]]:
    """Run programs, some at a time; yield each with its verdict and its seconds, in the order in which they end."""
    waiting = list(reversed(programs))
    running: dict[Any, tuple[Program, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            program = waiting.pop()
            here, there = _FORK.Pipe()
            process = _FORK.Process(target=_supervise, args=(program, there))
            process.start()
            there.close()
            running[here] = (program, process, time.monotonic())
        for pipe in wait(list(running)):
            program, process, started = running.pop(pipe)
            yield program, pipe.recv(), time.monotonic() - started
            pipe.close()
            process.join()


def _supervise(program: Program, answer: Connection) -> None:
    """Run the ranks of one program, and the same in one process meanwhile."""
    pipes, ranks = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(program.world):  # before the store, whose thread a fork would lose
            here, there = _FORK.Pipe()
            log = Path(folder, str(rank))
            ranks.append(_FORK.Process(target=_run_rank, args=(program, rank, there, log), daemon=True))
            ranks[-1].start()
            there.close()
            pipes.append(here)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in pipes:
            pipe.send(store.port)
        expected = Twin(program).run()
        endings = _collect(pipes, ranks)
        verdict = judge(endings, expected, must_be_right=program.must_be_right)
        for rank, ending in enumerate(endings):
            log = Path(folder, str(rank))
            if ending.failure is None and ending.exit_code != 0 and log.is_file():
                verdict.said.append(log.read_text(errors="replace")[-2000:])
    answer.send(verdict)


class _Idleness:
    """For how long nothing was computed: other programs on the machine stretch each time but this one, seconds."""

    def __init__(self, processes: Sequence[Any]) -> None:
        self.idle = [0.0] * len(processes)
        self._processes = processes
        self._before, _ = self._now()

    def look(self) -> None:
        """Count the time since the last look, unless one of the processes has computed meanwhile."""
        now, is_running = self._now()
        seconds, computed = (mine - before for mine, before in zip(now, self._before, strict=True))
        self._before = now
        if not is_running and computed < _BUSY * seconds:
            self.idle = [each + seconds for each in self.idle]

    def _now(self) -> tuple[tuple[float, float], bool]:
        """The time and that of the processors, and whether one of the processes has or waits for a processor."""
        ticks, states = 0, set()
        for process in self._processes:
            with suppress(OSError):
                values = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                states.add(values[0])
                ticks += int(values[11]) + int(values[12])
        return (time.monotonic(), ticks / os.sysconf("SC_CLK_TCK")), not states.isdisjoint("RD")


def _collect(pipes: Sequence[Connection], ranks: Sequence[Any]) -> list[Ending]:
    """Wait for all ranks to end, or to do nothing for `LIMIT` seconds."""
    endings = [Ending("the start") for _ in ranks]
    open_pipes, watch, until = list(pipes), _Idleness(ranks), time.monotonic() + LAST_LIMIT
    while open_pipes and min(watch.idle) < LIMIT and time.monotonic() < until:
        for pipe in wait(open_pipes, timeout=0.25):
            rank = pipes.index(pipe)
            try:
                said = pipe.recv()
            except (EOFError, ConnectionResetError):
                open_pipes.remove(pipe)
                continue
            if isinstance(said, Ending):
                endings[rank] = said.after(watch.idle[rank])
            else:
                endings[rank] = Ending(said)
                watch.idle[rank] = 0.0
        watch.look()
    for rank, process in enumerate(ranks):
        if pipes[rank] in open_pipes:
            process.kill()
            endings[rank] = replace(endings[rank], exit_code=None)
        process.join()
        if endings[rank].exit_code == 0 and not endings[rank].has_ended:
            endings[rank] = replace(endings[rank], exit_code=process.exitcode or 1)
    return endings


def _run_rank(program: Program, rank: int, pipe: Connection, log: Path) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: where the one that supervises it is killed
    printed = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    at, since = "the start", time.monotonic()

    def tell(what: str) -> None:
        nonlocal at, since
        at, since = what, time.monotonic()
        pipe.send(what)

    player = Rank(program, rank, tell)
    failure = None
    try:
        _join_group(rank, program.world, pipe.recv())
        player.run()
    except Exception as error:
        failure = Failure.of(error, time.monotonic() - since)
        traceback.print_exc()
        sys.last_value = error  # as the interpreter sets it
    pipe.send(Ending(at, player.notes, failure, has_ended=True))
    with suppress(Exception):
        atexit._run_exitfuncs()
    os._exit(failure is not None)


def _join_group(rank: int, world: int, port: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT),
    )
