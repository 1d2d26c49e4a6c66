"""Systems under comparison, each in processes of its own, which run one group at a time.

In one process they would disturb one another: Dynamo's caches and skips belong to code objects, allocators and thread
pools to the process. Measured in turn, round after round, they share what the machine's other load does to time. A
group that has no turn waits on a pipe and uses no processor time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

# How long one call may take before its workers are killed, seconds.
CALL_LIMIT = 900
# How long the other ranks may take to notice that one has failed, seconds.
GRACE = 10

# One thread a rank, so that ranks do not fight for cores; compilers work in the process that is measured.
_ENVIRON = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


class WorkerError(RuntimeError):
    """Workers raised, died or hang; the message names the group and holds every traceback."""


class Workers:
    """`world` gloo ranks on this machine, each of which makes one object and then calls its methods on request.

    Every group starts with an empty compiler cache of its own, which is removed in the end.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *args: Any,
        world: int,
        environ: Mapping[str, str] | None = None,
        place: Callable[[int], None] | None = None,
    ) -> None:
        """Starts the processes; `make(*args)` is called on each once the process group stands.

        Args:
            name: For error messages.
            make: Importable by name, such as a class at the top of a module.
            *args: Picklable.
            world: Number of ranks.
            environ: Environment variables that must be set before the workers import torch.
            place: Called with the rank in each process before it does anything else, such as to move it to a host.
                Picklable.

        Raises:
            WorkerError: `make` raised.
        """
        self.name = name
        self.world = world
        self._folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        caches = {
            variable: str(self._folder / variable) for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        try:
            with _environment({**_ENVIRON, **caches, "WORLD_SIZE": str(world), **(environ or {})}):
                for rank in range(world):
                    here, there = context.Pipe()
                    process = context.Process(
                        target=_work, args=(there, self._folder, rank, world, place, make, args), daemon=True
                    )
                    self._pipes.append(here)
                    process.start()
                    self._processes.append(process)
                    there.close()
            self._collect()
        except BaseException:  # Ctrl-C: nobody else knows of the processes yet
            self.close()
            raise

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank's object; returns what each rank returned.

        Raises:
            WorkerError: A rank raised, died or did not answer. The group is closed.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it died; `_collect` says how
                pipe.send((method, args))
        return self._collect()

    def dismiss(self) -> None:
        """Lets the processes go, without waiting for them: of many groups, dismiss all before you close the first."""
        for pipe in self._pipes:
            pipe.close()  # at which a rank that waits leaves

    def close(self) -> None:
        """Ends the processes and removes their folder."""
        self.dismiss()
        for process in self._processes:
            process.join(GRACE / 2)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        limit = CALL_LIMIT
        while waiting:
            ready = wait(list(waiting), timeout=limit)
            if not ready:
                answers.update(dict.fromkeys(waiting.values(), (False, f"no answer within {limit} s")))
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, self._last_words(rank))
            if not all(ok for ok, _ in answers.values()):
                limit = GRACE
        if not all(ok for ok, _ in answers.values()):
            errors = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
            self.close()
            raise WorkerError("\n".join([f"{self.name}: {len(errors)} of {self.world} ranks failed", *errors]))
        return [answers[rank][1] for rank in range(self.world)]

    def _last_words(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(GRACE)
        printed = _log(self._folder, rank).read_text(errors="replace").splitlines()
        return "\n".join([f"died with exit code {process.exitcode}; it had printed:", *printed[-20:]])


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment in which processes start, put back afterwards."""
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


def _work(
    pipe: Connection,
    folder: Path,
    rank: int,
    world: int,
    place: Callable[[int], None] | None,
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)  # what libraries print must not end up in the benchmark's table
    os.dup2(log, 2)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    try:
        if place is not None:
            place(rank)
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=CALL_LIMIT))
        session = make(*args)
        pipe.send((True, None))
        while True:
            method, values = pipe.recv()
            pipe.send((True, getattr(session, method)(*values)))
    except EOFError:
        return  # the benchmark is gone
    except BaseException:
        pipe.send((False, traceback.format_exc()))
