"""The sizes of a model's states with Adam, and their places, by formulas, in the pieces that the stores move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import nn

from dsgraph.inductor_ext import chunk_rows
from dsgraph.inductor_ext.transfers.buffer_pool import rounded
from dsgraph.passes import ParameterSpec
from dsgraph.passes.analysis.states import master_state_bytes, shard_bytes, state_bytes
from dsgraph.passes.memory.stream_parameters import StreamForwardParameters

from .chunk_sizes import CHUNK_BYTES, StateChunk, state_chunks, step_buffers
from .slots import share_of
from .stored_rows import WRITING_BYTES

_TRAVELLING = 2  # chunks of gradients on their way to the host: one arrives, one is stepped on
_FULL_COPIES = 3  # of a parameter in use, besides its rows: gathered, and its gradient before and after the reduction
_LOW = (torch.float16, torch.bfloat16)
_ANY_GROUP = "ranks"  # the model has no process group yet


@dataclass(frozen=True)
class OffloadSplit:
    """A split of the states: the numbers of offloaded pieces of the optimizer's state and of sharded parameters."""

    states: int
    parameters: int


@dataclass(frozen=True)
class Sizes:
    """Bytes of one rank, for each way in which a model's states can be split between the device and the tier below.

    Attributes:
        params: The parameters, in order.
        copies: Bytes of gathered copies, which stay.
        moves_parameters: True if sharded parameters can leave the device.
        to_host: True if the tier below is the host, where pieces are parameters; otherwise it is the disk, where they
            are chunks.
    """

    params: tuple[ParameterSpec, ...]
    copies: int
    moves_parameters: bool
    to_host: bool

    @classmethod
    def of(cls, model: nn.Module, stage: int, ranks: int, keep_whole_below: int, *, to_host: bool) -> Sizes:
        """Return the sizes of a model that will be partitioned like this; the tier below is the host or the disk."""
        params, copies = [], 0
        for name, param in model.named_parameters():
            sharded = stage > 0 and param.dim() > 0 and param.numel() >= max(1, keep_whole_below)
            shape = tuple(param.shape)
            own = (chunk_rows(len(param), ranks), *shape[1:]) if sharded else shape
            group = _ANY_GROUP if sharded else ""
            params.append(ParameterSpec(name, shape, own, param.dtype, group, param.requires_grad))
            copies += param.nbytes if sharded and stage != 3 else 0
        moves_parameters = stage == 3 and not to_host  # from a GPU, parameters cannot leave yet
        return cls(tuple(params), copies, moves_parameters, to_host)

    @cached_property
    def _movable(self) -> list[ParameterSpec]:
        return [param for param in self.params if self._is_movable(param)]

    def _is_movable(self, param: ParameterSpec) -> bool:
        return self.moves_parameters and bool(param.group)

    @cached_property
    def _trained(self) -> list[ParameterSpec]:
        return [param for param in self.params if param.requires_grad]

    @cached_property
    def _chunks(self) -> list[StateChunk]:
        """The chunks of the state while all parameters are in memory."""
        return state_chunks(self._trained, 1.0)

    @property
    def splits(self) -> Iterator[OffloadSplit]:
        """All splits, those that move less first."""
        states = len(self._trained) if self.to_host else len(self._chunks)
        yield from (OffloadSplit(number, 0) for number in range(states + 1))
        if states:
            yield from (OffloadSplit(states, number) for number in range(1, len(self._movable) + 1))

    @cached_property
    def least(self) -> int:
        """The smallest limit of the device's memory that suffices."""
        nothing, *rest = self.splits
        found = self.memory(nothing)
        for split in reversed(rest):  # what stays grows from here on
            if self._held(split) >= found:
                break
            found = min(found, self.memory(split))
        return found

    def within(self, limit: int) -> OffloadSplit | None:
        """Return the split that moves least among those that fit; None if none does."""
        fit = (split for split in self.splits if self._held(split) <= limit and self.memory(split) <= limit)
        return next(fit, None)

    def shares(self, split: OffloadSplit) -> tuple[float, float]:
        """Return the ratios for the stores: the share of the state, and that of parameters."""
        if self.to_host:
            pieces = [math.prod(param.shard_shape) for param in self._trained]
        else:
            pieces = [chunk.state for chunk in self._chunks]
        return share_of(pieces, split.states), share_of(
            [shard_bytes(param) for param in self._movable], split.parameters
        )

    def memory(self, split: OffloadSplit) -> int:
        """Return the bytes on the device."""
        return self._held(split) + self.buffers(split)

    def _held(self, split: OffloadSplit) -> int:
        """Return the bytes that are on the device all the time."""
        return self.copies + self._states_left[split.states] + self._parameters_left[split.parameters]

    @cached_property
    def _states_left(self) -> list[int]:
        """The bytes that stay, by the number of pieces that leave.

        Once one leaves, the others are padded to its width.
        """
        pieces = (
            [self._state(param) for param in self._trained] if self.to_host else [item.state for item in self._chunks]
        )
        return [sum(state_bytes(param) for param in self._trained), *_left(pieces)[1:]]

    @cached_property
    def _parameters_left(self) -> list[int]:
        stay = sum(_with_gradient(param) for param in self.params if not self._is_movable(param))
        return [stay + left for left in _left([_with_gradient(param) for param in self._movable])]

    def _state(self, param: ParameterSpec) -> int:
        """Return the bytes of the state; on the host, 16-bit parameters have a float32 master and its state."""
        if self.to_host and param.dtype in _LOW:
            return master_state_bytes(math.prod(param.shard_shape))
        return state_bytes(param)

    def _split(self, split: OffloadSplit) -> list[StateChunk]:
        if not split.parameters:
            found = enumerate(self._chunks)
            return [StateChunk(chunk.state, number < split.states, 0) for number, chunk in found]
        leaving = {param.name for param in self._movable[: split.parameters]}
        trained = (replace(param, tier="disk" if param.name in leaving else "") for param in self._trained)
        return state_chunks(list(trained), 1.0)

    def buffers(self, split: OffloadSplit) -> int:
        """Return the bytes of buffers on the device: for the disk the peak of a step, with a slow disk."""
        if self.to_host or not split.states:
            return 0
        leaving = self._movable[: split.parameters]
        if not leaving:
            return step_buffers(self._split(split), 0)
        ahead = min(
            max(StreamForwardParameters.ahead_bytes, 2 * _most(leaving)),
            sum(rounded(shard_bytes(param)) for param in leaving),
        )
        on_way = min(max(WRITING_BYTES, _most(leaving)), sum(rounded(_gradient(param)) for param in leaving))
        copies = _FULL_COPIES * max(math.prod(param.shape) * param.dtype.itemsize for param in leaving)
        return step_buffers(self._split(split), 0) + ahead + on_way + copies

    def below(self, split: OffloadSplit) -> int:
        """Return the bytes in the tier below."""
        if not split.states:
            return 0
        if self.to_host:
            there = self._trained[: split.states]
            masters = sum(
                shard_bytes(param) for param in there if param.dtype not in _LOW
            )  # their float32 rows once more
            travelling = _TRAVELLING * max(CHUNK_BYTES, *(self._state(param) for param in self._trained))
            return sum(self._state(param) for param in there) + masters + travelling
        rows = sum(2 * rounded(shard_bytes(param)) for param in self._movable[: split.parameters])
        return sum(chunk.buffer for chunk in self._split(split)) + rows


def _left(pieces: Sequence[int]) -> list[int]:
    """Return the bytes that stay of pieces without the first 0, 1, ... of them."""
    return [sum(pieces) - gone for gone in (0, *accumulate(pieces))]


def _gradient(param: ParameterSpec) -> int:
    return shard_bytes(param) * param.requires_grad


def _with_gradient(param: ParameterSpec) -> int:
    return shard_bytes(param) + _gradient(param)


def _most(params: Sequence[ParameterSpec]) -> int:
    return max(rounded(shard_bytes(param)) for param in params)
