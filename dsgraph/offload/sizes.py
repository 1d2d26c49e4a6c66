"""What a model's states take, and where, by formulas: of Adam, and in the pieces in which the stores move them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import nn

from dsgraph.inductor_ext import chunk_rows
from dsgraph.inductor_ext.transfers.buffers import rounded
from dsgraph.passes.analysis.states import OPTIMIZER_STATES, master_state_bytes
from dsgraph.passes.memory.stream_parameters import StreamForwardParameters

from .chunk_sizes import CHUNK_BYTES, StateChunk, TrainedRows, state_chunks, step_buffers
from .slots import share_of
from .stored_rows import WRITING_BYTES

_TRAVELLING = 2  # chunks of gradients on their way to the host: one arrives, one is stepped on
_FULL_COPIES = 3  # of a parameter in use, besides its rows: gathered, and its gradient before and after the reduction
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Split:
    """What leaves the device: so many pieces of the optimizer's state, and the first so many sharded parameters."""

    states: int
    parameters: int


@dataclass(frozen=True)
class _Param:
    """One parameter on one rank: bytes of its rows, of all of it, and what is kept of it."""

    rows: int
    full: int
    trained: bool
    movable: bool
    item: int
    is_low: bool

    @property
    def grad(self) -> int:
        return self.rows * self.trained

    @property
    def state(self) -> int:
        return OPTIMIZER_STATES * self.grad

    @property
    def wide_state(self) -> int:
        """On the host: that of 16-bit parameters is of their float32 masters, and has these."""
        return master_state_bytes(self.grad // self.item) if self.is_low else self.state


@dataclass(frozen=True)
class Sizes:
    """Bytes of one rank, for each way in which a model's states can be split between the device and the tier below.

    Attributes:
        params: In order.
        copies: Gathered copies that stay.
        to_host: Whether the host lies below, where pieces are parameters; else the disk, where they are chunks.
    """

    params: tuple[_Param, ...]
    copies: int
    to_host: bool

    @classmethod
    def of(cls, model: nn.Module, stage: int, ranks: int, keep_whole_below: int, *, to_host: bool) -> Sizes:
        """The sizes of a model that will be partitioned so, below which lies the host or the disk."""
        params, copies = [], 0
        for param in model.parameters():
            sharded = stage > 0 and param.dim() > 0 and param.numel() >= max(1, keep_whole_below)
            rows = chunk_rows(len(param), ranks) * (param.nbytes // len(param)) if sharded else param.nbytes
            movable = sharded and stage == 3 and not to_host  # from a GPU, parameters cannot leave yet
            is_low = to_host and param.dtype in _LOW
            params.append(_Param(rows, param.nbytes, param.requires_grad, movable, param.itemsize, is_low))
            copies += param.nbytes if sharded and stage != 3 else 0
        return cls(tuple(params), copies, to_host)

    @cached_property
    def _movable(self) -> list[_Param]:
        return [param for param in self.params if param.movable]

    @cached_property
    def _trained(self) -> list[_Param]:
        return [param for param in self.params if param.trained]

    @cached_property
    def _chunks(self) -> list[StateChunk]:
        """Those of the state while all parameters are in memory."""
        return state_chunks([TrainedRows(param.rows, on_disk=False) for param in self._trained], 1.0)

    @property
    def splits(self) -> Iterator[Split]:
        """All there are, those first that move less."""
        states = len(self._trained) if self.to_host else len(self._chunks)
        yield from (Split(number, 0) for number in range(states + 1))
        if states:
            yield from (Split(states, number) for number in range(1, len(self._movable) + 1))

    @cached_property
    def least(self) -> int:
        """The smallest limit of the device's memory that would do."""
        nothing, *rest = self.splits
        found = self.memory(nothing)
        for split in reversed(rest):  # what stays grows from here on
            if self._held(split) >= found:
                break
            found = min(found, self.memory(split))
        return found

    def within(self, limit: int) -> Split | None:
        """The split that moves least of those that fit; None: none does."""
        fit = (split for split in self.splits if self._held(split) <= limit and self.memory(split) <= limit)
        return next(fit, None)

    def shares(self, split: Split) -> tuple[float, float]:
        """What the stores are told: the share of the state, and that of parameters."""
        if self.to_host:
            pieces = [param.rows // param.item for param in self._trained]
        else:
            pieces = [chunk.state for chunk in self._chunks]
        return share_of(pieces, split.states), share_of([param.rows for param in self._movable], split.parameters)

    def memory(self, split: Split) -> int:
        """What is on the device."""
        return self._held(split) + self.buffers(split)

    def _held(self, split: Split) -> int:
        """What of it is there all the time."""
        return self.copies + self._states_left[split.states] + self._parameters_left[split.parameters]

    @cached_property
    def _states_left(self) -> list[int]:
        """By how many pieces leave; once one does, the others are as wide."""
        pieces = (
            [param.wide_state for param in self._trained] if self.to_host else [item.state for item in self._chunks]
        )
        return [sum(param.state for param in self._trained), *_left(pieces)[1:]]

    @cached_property
    def _parameters_left(self) -> list[int]:
        stay = sum(param.rows + param.grad for param in self.params if not param.movable)
        return [stay + left for left in _left([param.rows + param.grad for param in self._movable])]

    def _split(self, split: Split) -> list[StateChunk]:
        if not split.parameters:
            found = enumerate(self._chunks)
            return [StateChunk(chunk.state, number < split.states, 0) for number, chunk in found]
        leaving = set(map(id, self._movable[: split.parameters]))
        return state_chunks([TrainedRows(param.rows, id(param) in leaving) for param in self._trained], 1.0)

    def buffers(self, split: Split) -> int:
        """What of it is buffers: for the disk the most that a step can have at once, with a disk that falls behind."""
        if self.to_host or not split.states:
            return 0
        leaving = self._movable[: split.parameters]
        if not leaving:
            return step_buffers(self._split(split), 0)
        ahead = min(
            max(StreamForwardParameters.ahead_bytes, 2 * _most(leaving)), sum(rounded(param.rows) for param in leaving)
        )
        on_way = min(max(WRITING_BYTES, _most(leaving)), sum(rounded(param.grad) for param in leaving))
        copies = _FULL_COPIES * max(param.full for param in leaving)
        return step_buffers(self._split(split), 0) + ahead + on_way + copies

    def below(self, split: Split) -> int:
        """What is in the tier below."""
        if not split.states:
            return 0
        if self.to_host:
            there = self._trained[: split.states]
            masters = sum(param.rows for param in there if not param.is_low)  # their float32 rows once more
            travelling = _TRAVELLING * max(CHUNK_BYTES, *(param.wide_state for param in self._trained))
            return sum(param.wide_state for param in there) + masters + travelling
        rows = sum(2 * rounded(param.rows) for param in self._movable[: split.parameters])
        return sum(chunk.buffer for chunk in self._split(split)) + rows


def _left(pieces: Sequence[int]) -> list[int]:
    """What stays of pieces without the first 0, 1, ... of them."""
    return [sum(pieces) - gone for gone in (0, *accumulate(pieces))]


def _most(params: Sequence[_Param]) -> int:
    return max(rounded(param.rows) for param in params)
