"""The record of a step: which units ran, in which order, on which values and parameters."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dsgraph.partitioning.parameter import ParameterState

Entries = tuple[ParameterState, ...]
Key = tuple[Any, ...]
"""Identity of a call: ids of the parameters that the unit reads, whether gradients are enabled, and whether a full copy
of one of the parameters is held. Equal calls have equal keys.

The compiled graph is not part of the key, because ranks compile different graphs for batches of different sizes.
"""


@dataclass(frozen=True)
class Work:
    """The computation of a unit's forward.

    Attributes:
        operations: Floating-point operations.
        moved: Bytes read and written.
        dtype: Name of the dtype in which it computes, as in `torch.float32`.
    """

    operations: int = 0
    moved: int = 0
    dtype: str = "float32"


@dataclass(eq=False, frozen=True)
class StepUnit:
    """A compiled graph, or uncompiled code of a module that reads parameters.

    Attributes:
        name: Its name in prints.
        block: The repeated block whose graph it is, with `*` for what differs between blocks; empty for others.
        work: What it computes; nothing if that is not known.
    """

    name: str
    block: str = ""
    work: Work = Work()


UNCOMPILED = StepUnit("uncompiled code")
"""Stands for uncompiled code of a module that reads parameters. Autograd saves what its backward needs."""


@dataclass(frozen=True)
class Value:
    """A tensor between units.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        call: Number of the call that computed it; -1: none did.
        number: Number among the results of that call.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    call: int = -1
    number: int = 0


@dataclass(eq=False)
class Call:
    """A call of a unit in a forward.

    Attributes:
        unit: The unit.
        key: See `Key`.
        entries: The parameters that it reads.
        inputs: Its other inputs.
        outputs: Its results.
        saved_bytes: Bytes that autograd saves in it, besides full parameters.
        trained: The parameters whose gradients its backward adds to `.grad`; empty if the backward did not run.
    """

    unit: StepUnit
    key: Key
    entries: Entries
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    saved_bytes: int = 0
    trained: Entries = ()

    @property
    def name(self) -> str:
        """Name of the block that runs, by its first parameter; outside blocks that of the unit."""
        parts, place = self.unit.block.split("."), self.entries[0].name.split(".")
        is_inside = all(own == part or own.isdigit() for own, part in zip(place, parts, strict=False))
        return ".".join(place[: len(parts)]) if self.unit.block and is_inside else self.unit.name


@dataclass(eq=False)
class StepRecord:
    """The calls of one or several forwards, and the backward that followed.

    Attributes:
        calls: Calls of units, in their order.
        backward: Numbers of the calls whose backward ran, in their order.
        held: Parameters of which a full copy exists already, from a micro-batch before.
        kind: See `StepPlans.kind`.
    """

    calls: list[Call] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    held: frozenset[ParameterState] = frozenset()
    kind: Hashable = None
    _made: dict[int, tuple[int, int]] = field(default_factory=dict)

    def begin(self, unit: StepUnit, key: Key, entries: Entries, inputs: Sequence[Any]) -> int:
        """Note a call, and return its number."""
        values = tuple(
            _value(item, *self._made.get(item.data_ptr(), (-1, 0)))
            for item in inputs
            if type(item) is Tensor and item.layout is torch.strided
        )
        if unit is UNCOMPILED:
            given = next((call.outputs for call in reversed(self.calls) if call.outputs), ())
            unit = replace(unit, work=_work_of_layer(given, entries[0]))
        self.calls.append(Call(unit, key, entries, values))
        return len(self.calls) - 1

    def end(self, number: int, outputs: Any, saved_bytes: int) -> None:
        """Note the results of a call."""
        found = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        tensors = [item for item in found if type(item) is Tensor and item.layout is torch.strided]
        self._made |= {item.data_ptr(): (number, index) for index, item in enumerate(tensors)}
        call = self.calls[number]
        call.outputs = tuple(_value(item, number, index) for index, item in enumerate(tensors))
        call.saved_bytes = saved_bytes

    def beginning(self, calls: int, backwards: int = 0) -> StepRecord:
        """Return a record of the first calls and backwards, to be continued with other calls."""
        backward = self.backward[:backwards]
        kept = [
            replace(call, trained=call.trained if number in backward else ())
            for number, call in enumerate(self.calls[:calls])
        ]
        return StepRecord(kept, backward, self.held, self.kind)

    def without(self, alone: frozenset[ParameterState]) -> StepRecord:
        """Return a record in which the gradients of some parameters are reduced outside the graph of the step."""
        calls = [replace(call, trained=tuple(e for e in call.trained if e not in alone)) for call in self.calls]
        return replace(self, calls=calls)

    def timed(self, works: Sequence[Work]) -> StepRecord:
        """Return a record with other work of its first calls."""
        pairs = zip(self.calls, works, strict=False)
        calls = [replace(call, unit=replace(call.unit, work=work)) for call, work in pairs]
        return replace(self, calls=calls + self.calls[len(calls) :])

    @property
    def signature(self) -> tuple[Any, ...]:
        """Its identity among the kinds of steps."""
        calls = tuple((call.key, tuple(map(id, call.trained))) for call in self.calls)
        return calls, tuple(self.backward), self.held, self.kind


def _value(tensor: Tensor, call: int, number: int) -> Value:
    return Value(tuple(tensor.shape), tensor.dtype, tensor.device, call, number)


def _work_of_layer(given: Sequence[Value], weight: ParameterState) -> Work:
    """Return the work of a linear layer on the last results of a graph; nothing if the weight does not fit them.

    An embedding of the same width counts as such a layer, too: what reads the weight is not known.
    """
    shape, (dtype, _) = weight.spec.shape, weight.spec.dtypes(weight.param.dtype)
    rows = next((math.prod(item.shape[:-1]) for item in given if item.shape[-1:] == shape[1:]), 0)
    moved = 2 * rows * shape[0] * dtype.itemsize if rows else 0
    return Work(2 * rows * math.prod(shape), moved, str(dtype).removeprefix("torch.")) if len(shape) == 2 else Work()
