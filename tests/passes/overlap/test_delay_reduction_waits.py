from __future__ import annotations

import pytest
import torch
from torch.testing import FileCheck

from dsgraph.passes import CostModel, PassError, Pipeline
from dsgraph.passes.analysis.hardware import Device, Link
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.ir.graph import find_calls, is_barrier, wait_of
from dsgraph.passes.overlap.delay_reduction_waits import DelayReductionWaits
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes import lockstep
from tests.passes.tracing import GLOO, OUTER, SHARD, code, reduce, run_pass, trace

c10d = torch.ops._c10d_functional

# Every kernel takes a second, and every reduction next to nothing, or ten seconds.
DEVICE = Device(flops_per_s=1e30, bytes_per_s=1e30, kernel_s=1.0)
FAST, SLOW = (CostModel(DEVICE, (SHARD,), {"0": Link(latency_s=seconds, bytes_per_s=1e30)}) for seconds in (1e-6, 10.0))


def _three_gradients(x, y, z):
    return reduce(x * 2, (2, 3)), reduce(y * 3, (2, 3)), reduce(z * 4, (3,), group="", outer_groups=["0"])


def _inputs():
    return [torch.randn(4, 3), torch.randn(4, 3), torch.randn(3)]


def _lowered(function=_three_gradients, inputs=None, axes=(SHARD,)):
    gm = trace(function, *(inputs or _inputs()))
    run_pass(InsertZeroCollectives(), gm, *axes)
    run_pass(ChooseCollectiveAlgorithms(), gm, *axes)
    return gm


def test_each_is_waited_for_when_the_next_one_starts():
    gm = _lowered()
    assert run_pass(DelayReductionWaits(), gm, costs=FAST).changed == 2  # the last one's wait stands at the end already
    FileCheck().check("mul.Tensor(x_1, 2)").check_next("reduce_scatter_tensor").check_next(
        "mul.Tensor(y_1, 3)"
    ).check_next("wait_tensor").check_next("div").check_next("reduce_scatter_tensor").check_next(
        "mul.Tensor(z_1, 4)"
    ).check_next("wait_tensor").check_next("div").check_next("all_reduce").check_next("wait_tensor").run(code(gm))


def test_sums_over_ranks_move_along():
    gm = _lowered(axes=(GLOO,))
    assert run_pass(DelayReductionWaits(), gm, GLOO, costs=FAST).changed == 2
    FileCheck().check("exchange_by_messages").check_next("mul.Tensor(y_1, 3)").check_next("wait_tensor").check_next(
        "view"
    ).check_next("sum").check_next("div").check_next("exchange_by_messages").run(code(gm))


@pytest.mark.parametrize("axis", [SHARD, GLOO])
def test_meaning_is_kept_bit_for_bit(axis):
    inputs = [_inputs() for _ in range(2)]
    graphs = [_lowered(inputs=given, axes=(axis,)) for given in inputs]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(DelayReductionWaits(), gm, axis, costs=FAST)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)


def _computed_with(x, y):
    mean = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))  # a user's own: synchronised statistics
    return y * mean, reduce(x * 2, (2, 3))


def _communicated_again(x, y):
    return reduce(x * 2, (2, 3), outer_groups=["1"]), reduce(y * 3, (2, 3))


@pytest.mark.parametrize("function", [_computed_with, _communicated_again])
def test_what_is_computed_or_communicated_with_is_left_alone(function):
    gm = _lowered(function, [torch.randn(4, 3), torch.randn(4, 3)], axes=(SHARD, OUTER))
    started, following = collectives(gm)[:2]
    assert started.next is wait_of(started)
    (note,) = run_pass(DelayReductionWaits(), gm, SHARD, OUTER, costs=FAST).notes
    assert started.next is wait_of(started) < following
    name, reason = {
        _computed_with: ("all_reduce", " computes with what it reduces and with other values"),
        _communicated_again: ("reduce_scatter_tensor_default", "all_reduce_default communicates what it reduces again"),
    }[function]
    assert note.startswith(f"{name} [") and " is waited for immediately: " in note and note.endswith(reason)


@pytest.mark.parametrize("stop", [lambda x, y: torch.ops.dsgraph_tests.unknown(y), lambda x, y: y.copy_(x)])
def test_no_wait_moves_across_a_barrier(stop):
    def function(x, y):
        own = reduce(x, (2, 3))
        z = y * 2
        stopped = stop(x, y)
        return own, z, stopped * 1, reduce(x * 3, (2, 3))

    gm = _lowered(function, [torch.randn(4, 3), torch.randn(4, 3)])
    barrier = next(node for node in gm.graph.nodes if is_barrier(node))
    first = collectives(gm)[0]
    assert run_pass(DelayReductionWaits(), gm, costs=FAST).changed == 1
    assert first < find_calls(gm, torch.ops.aten.mul.Tensor)[0] < wait_of(first) < barrier


def test_a_graph_without_reductions():
    gm = trace(lambda x: (x + 1,), torch.randn(3))
    assert run_pass(DelayReductionWaits(), gm, costs=FAST).changed == 0


def test_a_second_run_changes_nothing():
    gm = _lowered()
    run_pass(DelayReductionWaits(), gm, costs=FAST)
    before = code(gm)
    assert run_pass(DelayReductionWaits(), gm, costs=FAST).changed == 0
    assert code(gm) == before


def test_it_needs_the_collectives():
    with pytest.raises(PassError, match="delay_reduction_waits requires 'zero-collectives'"):
        Pipeline([DelayReductionWaits()])


def _five_gradients(a, b, c, d, e):
    return tuple(reduce(x * 2, (2, 3)) for x in (a, b, c, d, e))


def _waits_at(costs, delay=None, **facts):
    """For each reduction, how many have been started when it is waited for."""
    gm = _lowered(_five_gradients, [torch.randn(4, 3) for _ in range(5)])
    run_pass(delay or DelayReductionWaits(), gm, costs=costs, **facts)
    started, found = 0, []
    for node in gm.graph.nodes:
        started += node.target is c10d.reduce_scatter_tensor.default
        found += [started] if node.target is c10d.wait_tensor.default else []
    return found


def test_on_a_fast_link_one_is_under_way_during_compute():
    assert _waits_at(FAST) == [1, 2, 3, 4, 5]


def test_on_a_slow_link_several_are():
    assert _waits_at(SLOW) == [5, 5, 5, 5, 5]


def test_what_is_under_way_stays_within_bounds():
    a_reduction = (12 + 6) * 4
    assert _waits_at(SLOW, DelayReductionWaits(in_flight_bytes=3 * a_reduction)) == [3, 4, 5, 5, 5]
    assert _waits_at(SLOW, memory_limit=1) == [1, 2, 3, 4, 5]


def test_slow_links_keep_the_meaning_bit_for_bit():
    inputs = [_inputs() for _ in range(2)]
    graphs = [_lowered(inputs=given) for given in inputs]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(DelayReductionWaits(), gm, costs=SLOW)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert all(map(torch.equal, before, after))
