"""What of a model's states is to lie on disk, so that the rest fits into memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dsgraph.byte_counts import on_device, read_bytes
from dsgraph.errors import OffloadError
from dsgraph.inductor_ext import chunk_rows
from dsgraph.passes.analysis.budget import OPTIMIZER_STATES
from dsgraph.sharding.table import KEEP_WHOLE_BELOW
from dsgraph.tiers.stored_rows import WRITING_BYTES

from .optimizer import CHUNK_BYTES, OptimizerOnDisk

_AHEAD_BYTES = 64 * 2**20  # of parameters that `StreamForwardParameters` reads ahead
_CHUNKS = 3  # of state in memory at once: one is read, one used, one written
_FULL_COPIES = 3  # of a parameter in use, besides its rows: gathered, and its gradient before and after the reduction


@dataclass(frozen=True)
class OffloadPlan:
    """Where the states of a model lie, on each rank.

    Attributes:
        parameters_ratio: The share of sharded parameters and their gradients on disk.
        optimizer_ratio: The share of the optimizer's state on disk.
        folder: On the disk.
        memory_bytes: What stays in memory, with the buffers through which the other passes; activations are no part.
        disk_bytes: What lies on disk.
        buffer_bytes: Those buffers.
        state_bytes: The optimizer's state, wherever it lies.
    """

    parameters_ratio: float
    optimizer_ratio: float
    folder: Path
    memory_bytes: int
    disk_bytes: int
    buffer_bytes: int
    state_bytes: int

    @property
    def parameters(self) -> dict[str, Any] | None:
        """For `partition(offload=...)`."""
        if not self.parameters_ratio:
            return None
        return {"parameters": "disk", "folder": str(self.folder), "ratio": self.parameters_ratio}

    def take(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer itself, or, if its state is to lie on disk, what runs it so.

        Raises:
            OffloadError: See `OptimizerOnDisk`.
        """
        if not self.optimizer_ratio:
            return optimizer
        self.folder.mkdir(parents=True, exist_ok=True)
        return OptimizerOnDisk(optimizer, folder=self.folder, ratio=self.optimizer_ratio)

    def limit_of_graphs(self, limit: int) -> int:
        """The backend's `memory_limit` with which a step takes no more than `limit` bytes.

        The backend knows of parameters on disk. It does not know of the buffers, nor of state on disk of a parameter in
        memory.
        """
        unseen = self.state_bytes * (self.optimizer_ratio - self.parameters_ratio)
        return limit + math.floor(unseen) - self.buffer_bytes

    def __str__(self) -> str:
        if not self.optimizer_ratio:
            return f"offload: nothing; the model's states take {self.memory_bytes:,} bytes of memory"
        return (
            f"offload: {self.optimizer_ratio:.0%} of the optimizer's state and {self.parameters_ratio:.0%} of "
            f"parameters and gradients lie on disk, {self.disk_bytes:,} bytes in {self.folder}; the model's states "
            f"take {self.memory_bytes:,} bytes of memory"
        )


def plan_offload(
    model: nn.Module,
    *,
    memory_limit: float | str,
    folder: Path | str,
    stage: int = 3,
    ranks: int | None = None,
    keep_whole_below: int = KEEP_WHOLE_BELOW,
) -> OffloadPlan:
    """Says what of a model's states has to lie on disk. Nothing is allocated, and the model may lie on `meta`.

    The optimizer's state goes first: of each byte that it spares, a step reads one and writes one. Of each byte of
    parameters and gradients, three are read or written.

    Args:
        model: It is not partitioned yet.
        memory_limit: What parameters, gradients, an optimizer's two averages and buffers may take of a rank's memory:
            bytes, a text such as "3GiB", or a share of the machine's. Activations come on top.
        folder: On the disk.
        stage: Of ZeRO, with which the model will be partitioned.
        ranks: How many there will be; None: as many as there are.
        keep_whole_below: That of `partition`.

    Raises:
        OffloadError: It does not fit; the error names the smallest limit that would do.
    """
    try:
        limit = on_device(read_bytes(memory_limit), "cpu")  # type: ignore[arg-type]
    except ValueError as error:
        raise OffloadError(f"memory_limit is {memory_limit!r}: {error}") from error
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    sizes = _Sizes.of(model, stage, ranks, keep_whole_below)
    for optimizer, parameters in sizes.shares(limit):
        found = sizes.memory(optimizer, parameters)
        if found <= limit:
            return OffloadPlan(
                *(parameters, optimizer, Path(folder)),
                memory_bytes=math.ceil(found),
                disk_bytes=math.ceil(sizes.state * optimizer + sizes.movable * parameters),
                buffer_bytes=sizes.buffers(optimizer, parameters),
                state_bytes=sizes.state,
            )
    hint = "" if stage == 3 else f"; stage {stage} keeps parameters in memory, stage 3 would take less"
    raise OffloadError(
        f"memory_limit is {limit:,} bytes, and the model's states take {sizes.least:,} at least, with everything on "
        f"disk that can be there: set it to that or more{hint}"
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one rank: what always stays in memory, what can lie on disk, and the buffers for that."""

    fixed: int
    state: int
    movable: int
    state_buffers: int
    parameter_buffers: int

    @classmethod
    def of(cls, model: nn.Module, stage: int, ranks: int, keep_whole_below: int) -> _Sizes:
        fixed = state = movable = most_state = most_rows = most_full = 0
        for param in model.parameters():
            full = param.nbytes
            sharded = stage > 0 and param.dim() > 0 and param.numel() >= max(1, keep_whole_below)
            rows = chunk_rows(len(param), ranks) * (full // len(param)) if sharded else full
            grad = rows if param.requires_grad else 0
            state += OPTIMIZER_STATES * grad
            most_state = max(most_state, OPTIMIZER_STATES * grad)
            if sharded and stage == 3:
                movable += rows + grad
                most_rows, most_full = max(most_rows, rows), max(most_full, full)
            else:
                fixed += rows + grad + (full if sharded else 0)
        return cls(
            *(fixed, state, movable),
            state_buffers=_CHUNKS * max(CHUNK_BYTES, most_state),
            parameter_buffers=max(_AHEAD_BYTES, 2 * most_rows)
            + max(WRITING_BYTES, most_rows)
            + _FULL_COPIES * most_full
            + _CHUNKS * max(CHUNK_BYTES, most_state),  # rows and gradients of the chunks
        )

    @property
    def least(self) -> int:
        return math.ceil(min(self.memory(0, 0), self.memory(1, 0), self.memory(1, 1)))

    def memory(self, optimizer: float, parameters: float) -> float:
        """What is in memory with such shares on disk."""
        in_memory = self.fixed + self.state * (1 - optimizer) + self.movable * (1 - parameters)
        return in_memory + self.buffers(optimizer, parameters)

    def buffers(self, optimizer: float, parameters: float) -> int:
        """What of it is buffers."""
        return self.state_buffers * bool(optimizer) + self.parameter_buffers * bool(parameters)

    def shares(self, limit: int) -> list[tuple[float, float]]:
        """Shares of the optimizer's state and of parameters that may fit, those that move the least first."""
        over = self.memory(0, 0) + self.state_buffers - limit
        found: list[tuple[float, float]] = [(0, 0)]
        if 0 < over <= self.state:
            found.append((over / self.state, 0))
        over += self.parameter_buffers - self.state
        if 0 < over <= self.movable:
            found.append((1, over / self.movable))
        return found
