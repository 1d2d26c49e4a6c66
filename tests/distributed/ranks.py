"""Ranks for tests: processes that stay alive from test to test, so that each test does not start torch anew."""

from __future__ import annotations

import faulthandler
import gc
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsgraph.launch.pool import Pool

# How long one call may take before its ranks are killed, seconds.
CALL_LIMIT = 240
# How long the other ranks may take to notice that one has failed, seconds.
GRACE = 45

# After so many calls new processes play the ranks. Torch keeps process groups that compiled code has used. A thread of
# each wakes up a hundred times a second: after a hundred calls they took a third of the machine.
CALLS_OF_A_PROCESS = 16

# Imported once, by the process from which all ranks are forked, and not by each of them.
_PRELOADED = [
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor", "dsgraph"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
]


class Processes:
    """The processes that play ranks, as many as the largest group so far has needed."""

    def __init__(self, *, method: str = "forkserver") -> None:
        """`method` starts them: "spawn" where they use CUDA, of which a forked process has nothing."""
        self.pool = Pool(_Player, method=method, preload=_PRELOADED if method == "forkserver" else ())
        self._calls = 0

    def count_call(self) -> None:
        """Hears that ranks are about to be called; those that have been called often give way to new ones."""
        self._calls += 1
        if self._calls % CALLS_OF_A_PROCESS == 0:
            self.stop()

    def stop(self) -> None:
        """Kills them; the next call starts new ones."""
        self.pool.stop()


class Ranks:
    """`world` gloo ranks on this machine."""

    def __init__(self, world: int, processes: Processes) -> None:
        self.world = world
        self._processes, self._pool = processes, processes.pool

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60,
        limit_s: float = CALL_LIMIT,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `function(*args, **kwargs)` on every rank, in a fresh process group; returns what each rank returned.

        A collective may take `timeout_s` seconds, the whole call `limit_s`.

        Raises:
            AssertionError: A rank raised; the message holds every rank's traceback.
        """
        self._processes.count_call()
        started = self._pool.start(self.world, limit=CALL_LIMIT, grace=GRACE)
        assert started.are_complete, started
        # Here, as torchrun has it in a process of its own: it outlives every rank.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        call = (function, args, kwargs, self.world, store.port, timeout_s)
        answers = self._pool.call("play", *call, count=self.world, limit=limit_s, grace=GRACE)
        if answers.are_complete:
            return [answers.values[rank] for rank in range(self.world)]
        self._pool.stop()  # ranks that failed or hang may have left the group in any state
        missing = sorted([*answers.dead, *answers.silent])
        lost = f"ranks {missing} did not answer in {limit_s} s or died\n" if missing else ""
        raise AssertionError(lost + "\n".join(f"rank {rank}: {text}" for rank, text in answers.errors.items()))


class _Player:
    """One rank, of one group after the other."""

    def __init__(self, rank: int) -> None:
        gc.freeze()  # what was preloaded: the collector need not walk it, nor a fork copy it
        self._rank = rank
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", category=FutureWarning)

    def play(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        world: int,
        port: int,
        timeout_s: float,
    ) -> Any:
        faulthandler.dump_traceback_later(CALL_LIMIT - 10)  # where it hangs, to stderr, before it is killed
        try:
            dist.init_process_group(
                "gloo",
                store=dist.TCPStore("127.0.0.1", port),
                rank=self._rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
            torch._dynamo.reset()
            result = function(*args, **kwargs)
            dist.barrier()
            dist.destroy_process_group()
            return result
        finally:
            faulthandler.cancel_dump_traceback_later()
