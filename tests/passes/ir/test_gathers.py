"""Gathers and reductions, and the units of a step that they serve."""

from __future__ import annotations

import torch
from torch.fx import Graph

from dsgraph.inductor_ext.units import RUN_BACKWARD, RUN_FORWARD
from dsgraph.passes.ir.gathers import computing_unit, reading_unit

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_REDUCE = torch.ops._c10d_functional.all_reduce.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def test_units_are_found_in_linear_time():
    graph = Graph()
    started = graph.call_function(_GATHER, (graph.placeholder("x"), 2, "0"))
    full = graph.call_function(_WAIT, (started,))
    for _ in range(200):  # twice as many paths after each of them
        full = graph.call_function(torch.mul, (full, graph.call_function(torch.sin, (full,))))
    assert reading_unit(started) is None
    first, second = (graph.call_function(RUN_FORWARD, (number, [], [full])) for number in range(2))
    assert reading_unit(started) is first and first < second


def test_a_reduction_belongs_to_the_last_unit_that_computes_it():
    graph = Graph()
    units = [graph.call_function(RUN_BACKWARD, (number, [], [])) for number in (1, 0)]
    total = graph.call_function(torch.add, tuple(units))
    for _ in range(200):
        total = graph.call_function(torch.mul, (total, graph.call_function(torch.sin, (total,))))
    reduced = graph.call_function(_REDUCE, (total, "sum", "0"))
    graph.call_function(_WAIT, (reduced,))
    assert computing_unit(reduced) is units[1]
