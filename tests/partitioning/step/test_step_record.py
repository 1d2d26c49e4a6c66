"""The record of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph.partitioning.step.step_record import StepRecord, StepUnit

A, B, C = (object() for _ in range(3))  # parameters, of which a record reads nothing
UNIT = StepUnit("unit")


def _record(*entries: Any) -> StepRecord:
    record = StepRecord()
    for number, entry in enumerate(entries):
        record.begin(UNIT, (id(entry), True), (entry,), ())
        record.end(number, (), 0)
        record.calls[number].trained = (entry,)
    record.backward.extend(reversed(range(len(entries))))
    return record


def test_values_are_known_by_the_call_that_made_them():
    record, x = StepRecord(), torch.ones(2, 3)
    record.begin(UNIT, (), (), [x, 3, None, x.to_sparse()])
    outputs: list[Tensor | None] = [None, x + 1, x.double()]
    record.end(0, outputs, 24)
    record.begin(UNIT, (), (), [outputs[2], x])
    record.end(1, x * 2, 0)
    assert [(value.call, value.number) for value in record.calls[0].inputs] == [(-1, 0)]
    assert [(value.call, value.number, value.dtype) for value in record.calls[1].inputs] == [
        (0, 1, torch.float64),
        (-1, 0, torch.float32),
    ]
    assert [value.shape for value in record.calls[0].outputs] == [(2, 3)] * 2 and record.calls[0].saved_bytes == 24
    assert len(record.calls[1].outputs) == 1


def test_records_of_equal_steps_have_one_signature():
    plain = _record(A, B, C).signature
    assert plain == _record(A, B, C).signature
    assert plain != _record(A, C, B).signature
    assert plain != _record(A, B).signature
    less, other, held = _record(A, B, C), _record(A, B, C), _record(A, B, C)
    less.calls[1].trained, other.backward, held.held = (), [2, 1], frozenset({A})
    assert plain not in [less.signature, other.signature, held.signature]


def test_a_step_that_goes_on_in_another_way_has_the_first_calls():
    record = _record(A, B, C)
    other = record.beginning(2)
    other.calls[0].trained = (C,)
    assert [call.entries for call in other.calls] == [(A,), (B,)] and not other.backward
    assert not other.calls[1].trained and record.calls[0].trained == (A,) and record.calls[1].trained == (B,)


def test_a_backward_that_goes_on_in_another_way_has_trained_what_ran():
    record = _record(A, B, C)
    other = record.beginning(3, 1)
    other.backward.append(0)
    assert [call.trained for call in other.calls] == [(), (), (C,)]
    assert other.backward == [2, 0] and record.backward == [2, 1, 0]
