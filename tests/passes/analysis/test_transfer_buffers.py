"""Buffers of parameters on disk in a graph."""

from __future__ import annotations

import torch

from dsgraph.passes.analysis.transfer_buffers import stored_gradients, transfer_buffers
from tests.passes.tracing import trace

ops = torch.ops.dsgraph
SIZE = 4 * 8 * 4  # bytes of the rows of one parameter


def _two_reads(first, second):
    ahead, behind = ops.fetch_parameter(first), ops.fetch_parameter(second)
    return ops.take_parameter(ahead, first) + ops.take_parameter(behind, second)


def _one_by_one(first, second):
    numbers = ops.take_parameter(ops.fetch_parameter(first), first)
    return numbers + ops.take_parameter(ops.fetch_parameter(second), second)


def _stores_amid_a_read(first, second):
    stored = ops.store_gradient(first * 2, first), ops.store_gradient(second * 2, second)
    return *stored, ops.take_parameter(ops.fetch_parameter(second), second)


def test_what_is_read_ahead_and_written_behind_takes_buffers():
    rows = torch.zeros(4, 8), torch.zeros(4, 8)
    sizes = [transfer_buffers(trace(step, *rows)) for step in (_two_reads, _one_by_one, _stores_amid_a_read)]
    assert sizes == [2 * SIZE, SIZE, 2 * SIZE]
    assert transfer_buffers(trace(torch.add, *rows)) == 0


def test_what_is_in_use_behind_each_gradient():
    found = stored_gradients(trace(_stores_amid_a_read, torch.zeros(4, 8), torch.zeros(4, 8)))
    assert [moment.buffers for moment in found] == [SIZE, 2 * SIZE]
    assert len({moment.rows for moment in found}) == 2
