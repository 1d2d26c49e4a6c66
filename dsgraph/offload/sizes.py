"""What a model's states take, and where, by formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dsgraph.inductor_ext import chunk_rows
from dsgraph.passes import ParamInfo
from dsgraph.passes.analysis.budget import OPTIMIZER_STATES, shard_bytes
from dsgraph.tiers.slots import first_of
from dsgraph.tiers.stored_rows import WRITING_BYTES

from .optimizer import CHUNK_BYTES

_AHEAD_BYTES = 64 * 2**20  # of parameters that `StreamForwardParameters` reads ahead
_AT_ONCE = 2  # chunks whose buffers a step has at once: one is stepped on, the next one read
_CHUNKS = 3  # of state in memory at once: one is read, one used, one written
_TRAVELLING = 2  # chunks of gradients on their way to the host: one arrives, one is stepped on
_FULL_COPIES = 3  # of a parameter in use, besides its rows: gathered, and its gradient before and after the reduction
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one rank: what always stays on the device, what can leave it, and the buffers for that.

    Attributes:
        fixed: Parameters and gradients that stay.
        state: The optimizer's state where all of it stays.
        wide_state: The state once some of it leaves: that of 16-bit parameters is of their float32 masters then.
        movable: Parameters and gradients that can leave.
        copies: Masters on the host of parameters on the device: their float32 rows once more.
        state_buffers: On the device, once state leaves.
        parameter_buffers: On the device, once parameters leave.
        below_buffers: In the tier below, once anything is there.
    """

    fixed: int
    state: int
    wide_state: int
    movable: int
    copies: int
    state_buffers: int
    parameter_buffers: int
    below_buffers: int

    @classmethod
    def of(cls, model: nn.Module, stage: int, ranks: int, keep_whole_below: int, *, to_host: bool) -> Sizes:
        """The sizes of a model that will be partitioned so, below which lies the host or the disk."""
        fixed = state = wide_state = movable = copies = most_state = most_rows = most_full = 0
        for param in model.parameters():
            full = param.nbytes
            sharded = stage > 0 and param.dim() > 0 and param.numel() >= max(1, keep_whole_below)
            rows = chunk_rows(len(param), ranks) * (full // len(param)) if sharded else full
            grad = rows if param.requires_grad else 0
            own_state = OPTIMIZER_STATES * grad
            state += own_state
            if to_host and param.dtype in _LOW:
                own_state = (OPTIMIZER_STATES + 1) * grad // param.itemsize * torch.float32.itemsize
            elif to_host:
                copies += grad
            wide_state += own_state
            most_state = max(most_state, own_state)
            if sharded and stage == 3 and not to_host:  # from a GPU, parameters cannot leave yet
                movable += rows + grad
                most_rows, most_full = max(most_rows, rows), max(most_full, full)
            else:
                fixed += rows + grad + (full if sharded and stage != 3 else 0)  # its gathered copy
        ahead, full_copies = max(_AHEAD_BYTES, 2 * most_rows), _FULL_COPIES * most_full
        chunks = _CHUNKS * max(CHUNK_BYTES, most_state)  # of state; and of rows with gradients
        on_way = max(WRITING_BYTES, most_rows)
        return cls(
            *(fixed, state, wide_state, movable, copies),
            state_buffers=0 if to_host else chunks,
            parameter_buffers=ahead + chunks + on_way + full_copies,
            below_buffers=_TRAVELLING * max(CHUNK_BYTES, most_state) if to_host else 0,
        )

    @property
    def least(self) -> int:
        """The smallest limit of the device's memory that would do."""
        all_parameters = (self.memory(1, 1),) if self.movable else ()
        return math.ceil(min(self.memory(0, 0), self.memory(1, 0), *all_parameters))

    def memory(self, optimizer: float, parameters: float) -> float:
        """What is on the device with such shares below it."""
        state = self.wide_state if optimizer else self.state
        in_memory = self.fixed + state * (1 - optimizer) + self.movable * (1 - parameters)
        return in_memory + self.buffers(optimizer, parameters)

    def buffers(self, optimizer: float, parameters: float) -> int:
        """What of it is buffers."""
        return self.state_buffers * bool(optimizer) + self.parameter_buffers * bool(parameters)

    def below(self, optimizer: float, parameters: float) -> float:
        """What is in the tier below with such shares there."""
        if not optimizer:
            return 0
        copies = self.copies * (optimizer - parameters)
        return self.wide_state * optimizer + copies + self.movable * parameters + self.below_buffers

    def shares_within(self, limit: int) -> tuple[float, float] | None:
        """Shares of the optimizer's state and of parameters that fit, those that move the least; None: none do."""
        over = self.memory(0, 0) - self.state + self.wide_state + self.state_buffers - limit
        found: list[tuple[float, float]] = [(0, 0)]
        if 0 < over <= self.wide_state:
            found.append((over / self.wide_state, 0))
        over += self.parameter_buffers - self.wide_state
        if 0 < over <= self.movable:
            found.append((1, over / self.movable))
        return next((shares for shares in found if self.memory(*shares) <= limit), None)


def step_buffers(params: Iterable[ParamInfo], graph_buffers: int) -> int:
    """Bytes of buffers through which what lies on disk passes in a step, past torch's allocator.

    The optimizer has two chunks of state at once, and of parameters that lie on disk as well their rows and gradients.
    Those have the same pool as the reads and writes of graphs.

    Args:
        params: Of the model, as graphs know them, in order.
        graph_buffers: See `StepMemory`.
    """
    known = [info for info in params if info.requires_grad and info.state_tier == "disk"]
    chunks = [*_chunks([info for info in known if info.tier]), *_chunks([info for info in known if not info.tier])]
    share = max((info.state_share for info in known), default=0.0)
    chunks = chunks[: first_of([state for state, _ in chunks], share)]
    pairs = [chunks[at : at + _AT_ONCE] for at in range(max(1, len(chunks) - 1))]
    state, rows = (max(sum(chunk[which] for chunk in pair) for pair in pairs) for which in (0, 1))
    return state + max(rows, graph_buffers)


def _chunks(params: Sequence[ParamInfo]) -> list[tuple[int, int]]:
    """Bytes of each chunk's state, and of rows and gradients of it that lie on disk."""
    found: list[tuple[int, int]] = []
    for info in params:
        state, rows = OPTIMIZER_STATES * shard_bytes(info), 2 * shard_bytes(info) * bool(info.tier)
        if found and found[-1][0] + state <= CHUNK_BYTES:
            found[-1] = found[-1][0] + state, found[-1][1] + rows
        else:
            found.append((state, rows))
    return found
