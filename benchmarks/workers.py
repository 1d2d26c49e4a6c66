"""Systems under comparison, each in processes of its own, which run one group at a time.

In one process they would disturb one another: Dynamo's caches and skips belong to code objects, allocators and thread
pools to the process. Measured in turn, round after round, they share what the machine's other load does to time. A
group that has no turn waits on a pipe and uses no processor time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from dsgraph.launch.pool import Pool
from dsgraph.launch.processes import Answers
from dsgraph.utils.errors import LaunchError

# How long one call may take before its workers are killed, seconds.
CALL_LIMIT = 900
# How long the other ranks may take to notice that one has failed, seconds.
GRACE = 10

# One thread a rank, so that ranks do not fight for cores; compilers work in the process that is measured.
_ENVIRON = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


class WorkerError(LaunchError):
    """Workers raised, died or hang; the message names the group and holds every traceback."""


class Workers:
    """`world` gloo ranks on this machine, each of which makes one object and then calls its methods on request.

    Every group starts with an empty compiler cache of its own, which is removed in the end. What libraries print goes
    to files in the same folder: it must not end up in the benchmark's table.
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
        """Start the processes; `make(*args)` is called on each once the process group stands.

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
        self._folder = folder = Path(tempfile.mkdtemp(prefix="benchmark-"))
        caches = {variable: str(folder / variable) for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        variables = {**_ENVIRON, **caches, "WORLD_SIZE": str(world), **(environ or {})}
        self._pool = Pool(_join, folder / "store", world, place, make, args, environ=variables, logs=folder)
        try:
            self._values(self._pool.start(world, limit=CALL_LIMIT, grace=GRACE))
        except BaseException:  # Ctrl-C: nobody else knows of the processes yet
            self.close()
            raise

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's object; return what each rank returned.

        Raises:
            WorkerError: A rank raised, died or did not answer. The group is closed.
        """
        return self._values(self._pool.call(method, *args, count=self.world, limit=CALL_LIMIT, grace=GRACE))

    def dismiss(self) -> None:
        """Let the processes go, without waiting for them: of many groups, dismiss all before you close the first."""
        self._pool.dismiss()

    def close(self) -> None:
        """End the processes and remove their folder."""
        self._pool.stop(patience=GRACE / 2)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _values(self, answers: Answers) -> list[Any]:
        if answers.are_complete:
            return [answers.values[rank] for rank in range(self.world)]
        found = dict(answers.errors)
        found |= {rank: self._pool.last_words(rank, patience=GRACE) for rank in answers.dead}
        limit = GRACE if found else CALL_LIMIT
        found |= dict.fromkeys(answers.silent, f"no answer within {limit} s")
        self.close()
        errors = [f"rank {rank}: {text}" for rank, text in sorted(found.items())]
        raise WorkerError("\n".join([f"{self.name}: {len(errors)} of {self.world} ranks failed", *errors]))


def _join(
    rank: int,
    store: Path,
    world: int,
    place: Callable[[int], None] | None,
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Join the process group and make the object that is called."""
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    if place is not None:
        place(rank)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=CALL_LIMIT),
    )
    return make(*args)
