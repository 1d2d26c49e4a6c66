from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import FileCheck

from dsgraph.passes import CostModel, PassContext, PassError, Phase, Pipeline
from dsgraph.passes.analysis.hardware import DEVICES, Device, Link
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.analysis.sizes import tensor_bytes
from dsgraph.passes.core.collective_order import collective_lines
from dsgraph.passes.ir.coalesced import results_of, waits_of
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.overlap.bucket_reductions import BucketReductions
from dsgraph.passes.overlap.delay_reduction_waits import DelayReductionWaits
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from dsgraph.tools.reporting.traffic import graph_traffic
from tests.passes import lockstep
from tests.passes.tracing import GLOO, OUTER, SHARD, code, reduce, run_pass, trace

c10d = torch.ops._c10d_functional
aten = torch.ops.aten

ON_BOTH = pytest.mark.parametrize("axis", [SHARD, GLOO], ids=["nccl", "gloo"])


def _three_gradients(x, y, z):
    return tuple(reduce(one * 2, (2, 3)) for one in (x, y, z))


def _inputs():
    return [torch.randn(4, 3) for _ in range(3)]


def _lowered(function=_three_gradients, inputs=None, *axes):
    axes = axes or (SHARD,)
    gm = trace(function, *(inputs or _inputs()))
    run_pass(InsertZeroCollectives(), gm, *axes)
    run_pass(ChooseCollectiveAlgorithms(), gm, *axes)
    return gm


def _bucket_sizes(gm):
    return [len(results_of(started)) for started in collectives(gm)]


def test_a_bucket_starts_with_its_last_gradient_and_waits_follow():
    gm = _lowered()
    assert run_pass(BucketReductions(), gm).changed == 3
    FileCheck().check("mul.Tensor(x_1, 2)").check_next("mul.Tensor(y_1, 2)").check_next(
        "mul.Tensor(z_1, 2)"
    ).check_next("reduce_scatter_tensor_coalesced.default([mul, mul_1, mul_2], 'sum', 2, '0')").check_next(
        "[0]"
    ).check_next("[1]").check_next("[2]").check_next("wait_tensor.default(getitem)").check_next("div").check_next(
        "wait_tensor.default(getitem_1)"
    ).check_next("div").check_next("wait_tensor.default(getitem_2)").check_next("div").check_not("reduce_scatter").run(
        code(gm)
    )


def test_sums_over_ranks_move_along():
    gm = _lowered(_three_gradients, None, GLOO)
    assert run_pass(BucketReductions(), gm, GLOO).changed == 3
    FileCheck().check("mul.Tensor(z_1, 2)").check_next(
        "exchange_by_messages_coalesced.default([mul, mul_1, mul_2], 2, '0')"
    ).check_count("[", 3).check_next("wait_tensor").check_next("view").check_next("sum").check_next("div").check_next(
        "wait_tensor"
    ).run(code(gm))


@ON_BOTH
def test_meaning_is_kept_bit_for_bit(axis):
    inputs = [_inputs() for _ in range(2)]
    graphs = [_lowered(_three_gradients, given, axis) for given in inputs]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        assert run_pass(BucketReductions(), gm, axis).changed == 3
        run_pass(DelayReductionWaits(), gm, axis)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert all(map(torch.equal, before, after))


@ON_BOTH
def test_there_are_fewer_collectives_of_as_many_bytes(axis):
    gm = _lowered(_three_gradients, None, axis)
    (before,) = graph_traffic(gm, [axis])
    run_pass(BucketReductions(), gm, axis)
    (after,) = graph_traffic(gm, [axis])
    assert (before.count, after.count) == (3, 1)
    assert before.kind == after.kind
    assert before.sent_bytes == after.sent_bytes == 3 * 2 * 3 * 4


def test_other_dtypes_groups_and_kinds_never_mix():
    def function(*gradients):
        a, b, c, d, e, f, g = gradients
        yield reduce(a * 2, (2, 3))
        yield reduce(b * 2, (2, 3))
        yield reduce(c * 2, (2, 3), reduce_dtype=torch.bfloat16)
        yield reduce(d * 2, (2, 3), group="1")
        yield reduce(e * 2, (2, 3), group="1")
        yield c10d.wait_tensor(c10d.reduce_scatter_tensor(f, "max", 2, "1"))
        yield reduce(g * 2, (4, 3), group="", outer_groups=["1"])

    gm = _lowered(lambda *inputs: tuple(function(*inputs)), [torch.randn(4, 3) for _ in range(7)], SHARD, OUTER)
    assert run_pass(BucketReductions(), gm, SHARD, OUTER).changed == 4
    assert _bucket_sizes(gm) == [2, 1, 2, 1, 1]


def test_a_result_that_is_computed_or_communicated_with_ends_a_bucket():
    def function(x, y, z):
        own = reduce(x * 2, (2, 3))
        mean = c10d.wait_tensor(c10d.reduce_scatter_tensor(y, "sum", 2, "0"))  # a user's own: statistics
        return own, mean * z[:2], reduce(z * 3, (2, 3)), reduce(z * 4, (2, 3), outer_groups=["1"]), reduce(x, (2, 3))

    gm = _lowered(function, _inputs(), SHARD, OUTER)
    result = run_pass(BucketReductions(), gm, SHARD, OUTER)
    assert _bucket_sizes(gm) == [2, 2, 1, 1]
    reasons = [note.partition(": ")[2] for note in result.notes]
    assert len(reasons) == 1 and "computes with what it reduces and with other values" in reasons[0]


@pytest.mark.parametrize("stop", [lambda x: torch.ops.dsgraph_tests.unknown(x), lambda x: x.copy_(x + 1)])
def test_no_reduction_moves_across_a_barrier(stop):
    def function(x, y, z):
        first = reduce(x * 2, (2, 3))
        stopped = stop(z)
        return first, stopped * 2, reduce(y * 2, (2, 3))

    gm = _lowered(function)
    before = code(gm)
    result = run_pass(BucketReductions(), gm)
    assert result.changed == 0 and code(gm) == before
    assert any("in between may write to it, or is unknown" in note for note in result.notes)


@settings(max_examples=25)
@given(rows=st.lists(st.integers(1, 40), min_size=1, max_size=7), cap=st.integers(1, 1500))
def test_no_bucket_of_several_exceeds_the_cap(rows, cap):
    def function(*gradients):
        return tuple(reduce(one * 2, (one.shape[0] // 2, 4)) for one in gradients)

    gm = _lowered(function, [torch.randn(2 * count, 4) for count in rows])
    run_pass(BucketReductions(bucket_bytes=cap, latency_share=0.0), gm)
    found = [[tensor_bytes(node.meta["val"]) for node in started.all_input_nodes] for started in collectives(gm)]
    assert [size for one in found for size in one] == [2 * 16 * count for count in rows], "all, in their order"
    assert all(sum(bucket) <= cap for bucket in found if len(bucket) > 1)
    assert all(sum(one) + other[0] > cap for one, other in pairwise(found)), "none too early"


def test_large_ones_go_alone_and_the_note_has_both_figures():
    axis = replace(SHARD, backend="fake")
    gm = _lowered(_three_gradients, None, axis)
    # A gradient, of which a rank sends 24 bytes, takes a millisecond and a thousandth of one for its start.
    costs = CostModel(DEVICES["cpu"], (axis,), {"0": Link(1e-6, 24 / 1e-3)})
    result = run_pass(BucketReductions(), gm, axis, costs=costs)
    assert result.changed == 0 and _bucket_sizes(gm) == [1, 1, 1]
    (note,) = result.notes
    assert note.startswith("3 collectives are not bucketed: predicted 3.003 ms separately and 3.001 ms in 1 buckets")


def test_a_graph_without_reductions():
    gm = trace(lambda x: (x + 1,), torch.randn(3))
    assert run_pass(BucketReductions(), gm) == run_pass(BucketReductions(), gm)


def test_a_second_run_changes_nothing():
    gm = _lowered()
    assert run_pass(BucketReductions(bucket_bytes=100), gm).changed == 2
    before = code(gm)
    assert run_pass(BucketReductions(bucket_bytes=100), gm).changed == 0
    assert code(gm) == before


def test_it_needs_the_collectives_and_comes_before_the_delay():
    with pytest.raises(PassError, match="bucket_reductions requires 'zero-collectives'"):
        Pipeline([BucketReductions()])
    with pytest.raises(PassError, match="bucket_reductions must run before delay_reduction_waits"):
        Pipeline([InsertZeroCollectives(), DelayReductionWaits(), BucketReductions()])


# What other passes and analyses make of a bucket


def _four_gradients(*gradients):
    return tuple(reduce(one * 2, (2, 3)) for one in gradients)


def test_a_bucket_is_waited_for_when_the_next_one_starts():
    gm = _lowered(_four_gradients, [torch.randn(4, 3) for _ in range(4)])
    run_pass(BucketReductions(bucket_bytes=100), gm)
    costs = CostModel(Device(1e30, 1e30, kernel_s=1.0), (SHARD,), {"0": Link(1e-6, 1e30)})
    assert run_pass(DelayReductionWaits(), gm, costs=costs).changed == 1
    first, second = collectives(gm)
    third, last = find_calls(gm, aten.mul.Tensor)[2:]
    assert first < third < last < waits_of(first)[0] < waits_of(first)[1] < second


def test_each_gradient_lives_until_its_own_wait():
    gm = _lowered()
    run_pass(BucketReductions(), gm)
    memory = simulate(gm)
    (bucket,) = collectives(gm)
    read = [memory.by_name[node.name] for node in bucket.all_input_nodes]
    assert [memory.nodes[piece.last] for piece in read] == [wait.name for wait in waits_of(bucket)]
    made = [piece for piece in memory.pieces if piece.node.partition(":")[0] == bucket.name]
    assert [piece.bytes for piece in made] == [24, 24, 24]


def test_the_order_of_collectives_names_all_gradients():
    gm = _lowered()
    run_pass(BucketReductions(), gm)
    ctx = PassContext(Phase.BACKWARD, (SHARD,), gradients={0: "first", 1: "second", 2: "third"})
    (line,) = collective_lines(gm, ctx)
    assert line.endswith("for the gradient of first and for the gradient of second and for the gradient of third")
