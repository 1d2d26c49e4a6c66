"""The work of one rank in a benchmark of training: build, compile, warm up, and then steps on request."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.memory import AllocationCounter
from benchmarks.systems import System
from benchmarks.wire import record_collectives, sent_bytes
from examples.gpt import GPT, GPTConfig

GPT_27M = GPTConfig(vocab=8192, width=512, heads=8, layers=6)
GPT_TINY = GPTConfig(vocab=64, width=32, heads=2, layers=1)


@dataclass(frozen=True)
class Workload:
    """The model and its data: equal for all systems, and for one process with everybody's rows.

    Attributes:
        model: Sizes of the GPT.
        batch: Rows of a rank.
        length: Tokens of a row.
        world: Number of ranks whose rows make up a batch.
    """

    model: GPTConfig = GPT_27M
    batch: int = 2
    length: int = 128
    world: int = 2

    def quick(self) -> Workload:
        """Return a model for smoke runs: 20 thousand parameters."""
        return replace(self, model=GPT_TINY, length=16)

    def build(self) -> GPT:
        """Return the model, with the same weights in every process."""
        torch.manual_seed(0)
        return GPT(self.model)

    def rows(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of one rank, each `[batch, length]` int64, random and always the same."""
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        text = torch.randint(0, self.model.vocab, (self.batch, self.length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def all_rows(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the rows of all ranks, each `[world * batch, length]`."""
        tokens, targets = zip(*(self.rows(step, rank) for rank in range(self.world)), strict=True)
        return torch.cat(tokens), torch.cat(targets)


class Training:
    """One system's training on this rank. All ranks call the same methods in the same order."""

    def __init__(self, system: System, workload: Workload, counter: Path | None) -> None:
        """Set the system up.

        Args:
            system: What trains.
            workload: What to train.
            counter: From `memory.build_counter`.
        """
        self._counter = AllocationCounter(counter) if counter is not None else None
        self._workload = replace(workload, batch=system.micro_batches * workload.batch)
        self._alone = system.alone
        self._losses: list[Tensor] = []
        self._step = system.setup(workload.build())

    def first_step(self) -> float:
        """Return the seconds of the next step, which compiles if it is the first."""
        return self.timed_steps(1)[0]

    def peak_bytes(self, steps: int) -> int | None:
        """Return the most bytes of tensors alive at once during the next steps; None when nothing counts them.

        It covers whatever was allocated since before the model was built: parameters, gradients, optimizer state,
        activations and buffers for communication.
        """
        if self._counter is None:
            self.timed_steps(steps)
            return None
        self._counter.reset_peak()
        self.timed_steps(steps)
        return self._counter.peak

    def sent_bytes(self) -> float | None:
        """Return the bytes that this rank must send for the collectives of the next step.

        None when they are not all known.
        """
        batch = self._batch()
        world = dist.get_world_size()
        collectives = record_collectives(lambda: self._losses.append(self._step(*batch)))
        return sent_bytes(collectives, world)

    def timed_steps(self, count: int) -> list[float]:
        """Return the seconds of each of the next steps, from one barrier to the next."""
        times = []
        for _ in range(count):
            batch = self._batch()
            dist.barrier()
            started = time.perf_counter()
            self._losses.append(self._step(*batch))
            dist.barrier()
            times.append(time.perf_counter() - started)
        return times

    def losses(self) -> list[float]:
        """Return this rank's loss of every step so far, in nats."""
        return [float(loss) for loss in self._losses]

    def _batch(self) -> tuple[Tensor, Tensor]:
        step = len(self._losses)
        return self._workload.all_rows(step) if self._alone else self._workload.rows(step, dist.get_rank())
