from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import FileCheck
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes import CostModel, MeshAxis, ParameterSpec, PassContext, PassError, Phase, Pipeline
from dsgraph.passes.analysis.hardware import DEVICES, Device, Link
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.analysis.predicted_times import predict
from dsgraph.passes.analysis.sizes import tensor_bytes
from dsgraph.passes.core.collective_order import collective_lines
from dsgraph.passes.ir.coalesced import collective_behind, results_of, waits_of
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.ir.graph import KEPT, find_calls
from dsgraph.passes.overlap.bucket_gathers import BucketBackwardGathers, BucketForwardGathers
from dsgraph.passes.overlap.prefetch_gathers import PrefetchBackwardGathers, PrefetchForwardGathers
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from dsgraph.tools.reporting.traffic import graph_traffic
from tests.passes import lockstep
from tests.passes.tracing import GLOO, OUTER, SHARD, code, gather, run_pass, trace

c10d = torch.ops._c10d_functional
aten = torch.ops.aten

FAKE = replace(SHARD, backend="fake")
BOTH = pytest.mark.parametrize("bucket", [BucketForwardGathers(), BucketBackwardGathers()])
ON_BOTH = pytest.mark.parametrize(
    ("axis", "op"), [(SHARD, "all_gather_into_tensor"), (GLOO, "gather_by_messages")], ids=["nccl", "gloo"]
)


def _costs(latency_s: float, bytes_per_s: float, axes=(SHARD,)) -> CostModel:
    return CostModel(DEVICES["cpu"], axes, {axis.group: Link(latency_s, bytes_per_s) for axis in axes})


def _three_layers(x, a, b, c):
    for shard in (a, b, c):
        x = torch.mm(x, gather(shard, (4, 4))).sin()
    return (x,)


def _inputs():
    return [torch.randn(2, 4), *(torch.randn(2, 4) for _ in range(3))]


def _lowered(function=_three_layers, inputs=None, *axes):
    axes = axes or (SHARD,)
    gm = trace(function, *(inputs or _inputs()))
    run_pass(InsertZeroCollectives(), gm, *axes)
    run_pass(ChooseCollectiveAlgorithms(), gm, *axes)
    return gm


def _members(gm):
    """The inputs of each gather, in the order of the gathers."""
    return [[node.name.removesuffix("_1") for node in started.all_input_nodes] for started in collectives(gm)]


@BOTH
@ON_BOTH
def test_neighbours_start_together_and_are_waited_for_one_by_one(bucket, axis, op):
    gm = _lowered(_three_layers, None, axis)
    assert run_pass(bucket, gm, axis).changed == 3
    FileCheck().check_not("sin").check(f"{op}_coalesced.default([a_1, b_1, c_1], 2, '0')").check_next("[0]").check_next(
        "[1]"
    ).check_next("[2]").check_next("wait_tensor.default(getitem)").check_next("mm").check_next("sin").check_next(
        "wait_tensor.default(getitem_1)"
    ).check_next("mm").check_next("sin").check_next("wait_tensor.default(getitem_2)").check_next("mm").check_not(
        op
    ).run(code(gm))


@ON_BOTH
def test_there_are_fewer_collectives_of_as_many_bytes(axis, op):
    gm = _lowered(_three_layers, None, axis)
    before = graph_traffic(gm, [axis])
    run_pass(BucketForwardGathers(), gm, axis)
    (after,) = graph_traffic(gm, [axis])
    assert [(one.kind, one.count, one.sent_bytes) for one in before] == [(op, 3, 3 * 2 * 4 * 4)]
    assert (after.kind, after.count, after.sent_bytes) == (op, 1, 3 * 2 * 4 * 4)


@ON_BOTH
def test_meaning_is_kept_bit_for_bit(axis, op):
    inputs = [_inputs() for _ in range(2)]
    graphs = [_lowered(_three_layers, given, axis) for given in inputs]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        assert run_pass(BucketForwardGathers(), gm, axis).changed == 3
        run_pass(PrefetchForwardGathers(), gm, axis)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert torch.equal(before[0], after[0])


def test_buckets_follow_the_order_of_use_not_that_of_the_starts():
    def function(x, a, b, c):
        early = c10d.all_gather_into_tensor(c, 2, "0")
        x = x.cos()
        for shard in (a, b):
            x = torch.mm(x, gather(shard, (4, 4)))
        return (torch.mm(x, c10d.wait_tensor(early)),)

    def bucketed(bucket_bytes):
        gm = _lowered(function)
        for node in find_calls(gm, c10d.all_gather_into_tensor.default):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        assert _members(gm) == [["c"], ["a"], ["b"]]
        run_pass(BucketForwardGathers(bucket_bytes=bucket_bytes), gm)
        return gm

    assert _members(bucketed(2 * 64)) == [["c"], ["a", "b"]]
    together = bucketed(3 * 64)
    assert _members(together) == [["a", "b", "c"]]
    assert collectives(together)[0] < find_calls(together, aten.cos.default)[0], "where the first of them started"


def test_what_is_gathered_into_two_dtypes_or_over_two_groups_never_mixes():
    def function(x, a, b, c, d, e):
        x = torch.mm(x, gather(a, (4, 4)))
        x = torch.mm(x, gather(b, (4, 4)))
        x = torch.mm(x, gather(c, (4, 4), dtype=torch.bfloat16).float())
        x = torch.mm(x, gather(d, (4, 4), group="1"))
        return (torch.mm(x, gather(e, (4, 4), group="1")),)

    gm = _lowered(function, [torch.randn(2, 4) for _ in range(6)], SHARD, OUTER)
    assert run_pass(BucketForwardGathers(), gm, SHARD, OUTER).changed == 4
    assert [len(results_of(started)) for started in collectives(gm)] == [2, 1, 2]


def test_what_the_graph_computes_is_left_alone():
    def function(x, a):
        y = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0"))
        z = c10d.wait_tensor(c10d.all_gather_into_tensor(y.sin(), 2, "0"))
        return z, c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, "0"))

    gm = trace(function, torch.randn(2, 4), torch.randn(2, 4))
    before = code(gm)
    result = run_pass(BucketForwardGathers(), gm)
    assert result.changed == 0 and code(gm) == before
    assert any("one of the two gathers a value that the graph computes" in note for note in result.notes)


@pytest.mark.parametrize(
    ("axis", "note"),
    [
        (MeshAxis("shard", 2, "0", "mpi"), "on backend 'mpi': it is not known to run several collectives as one"),
        (MeshAxis("shard", 2, "another", "nccl"), None),
    ],
)
def test_other_backends_and_groups_are_left_alone(axis, note):
    gm = _lowered()
    result = run_pass(BucketForwardGathers(), gm, axis)
    assert result.changed == 0 and len(collectives(gm)) == 3
    assert note is None or (len(result.notes) == 1 and note in result.notes[0])


@BOTH
@pytest.mark.parametrize("stop", [lambda x, y: torch.ops.dsgraph_tests.unknown(x), lambda x, y: aten.copy_(y, x)])
def test_no_gather_moves_across_a_barrier(bucket, stop):
    def function(x, a, b, y):
        x = torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, "0")))
        x = x + stop(x, y)
        return (torch.mm(x, c10d.wait_tensor(c10d.all_gather_into_tensor(b, 2, "0"))),)

    gm = trace(function, *(torch.randn(2, 4) for _ in range(4)))
    before = code(gm)
    result = run_pass(bucket, gm)
    assert result.changed == 0 and code(gm) == before
    assert any("in between may write to it, or is unknown" in note for note in result.notes)


def test_casts_and_padding_move_along():
    def function(x, a, b):
        x = torch.mm(x, gather(a, (4, 4))).sin()
        return (torch.mm(x, gather(b.bfloat16(), (5, 4), dtype=torch.float32)[:4]),)

    gm = _lowered(function, [torch.randn(2, 4) for _ in range(3)])
    assert run_pass(BucketForwardGathers(), gm).changed == 2
    FileCheck().check("_to_copy").check_next("convert_element_type").check_next("constant_pad_nd").check_next(
        "all_gather_into_tensor_coalesced.default([a_1, constant_pad_nd"
    ).check("wait_tensor").check("mm").check("sin").check("wait_tensor").run(code(gm))


@settings(max_examples=25)
@given(rows=st.lists(st.integers(1, 40), min_size=1, max_size=7), cap=st.integers(1, 1500))
def test_no_bucket_of_several_exceeds_the_cap(rows, cap):
    def function(x, *shards):
        return tuple(gather(shard, (2 * shard.shape[0], 4)) * x for shard in shards)

    gm = _lowered(function, [torch.randn(4), *(torch.randn(count, 4) for count in rows)])
    run_pass(BucketForwardGathers(bucket_bytes=cap, latency_share=0.0), gm)
    found = [[tensor_bytes(result.meta["val"]) for result in results_of(started)] for started in collectives(gm)]
    assert [size for one in found for size in one] == [2 * 16 * count for count in rows], "all, in their order"
    assert all(sum(bucket) <= cap for bucket in found if len(bucket) > 1)
    assert all(sum(one) + other[0] > cap for one, other in pairwise(found)), "none too early"


def test_large_ones_go_alone_and_the_note_has_both_figures():
    gm, costs = _lowered(_three_layers, None, FAKE), _costs(1e-6, 32 / 1e-3, (FAKE,))
    # A gather of 32 bytes sent takes a millisecond and a thousandth of one for its start.
    result = run_pass(BucketForwardGathers(), gm, FAKE, costs=costs)
    assert result.changed == 0 and len(collectives(gm)) == 3
    (note,) = result.notes
    assert note.startswith("3 collectives are not bucketed: predicted 3.003 ms separately and 3.001 ms in 1 buckets")
    assert run_pass(BucketForwardGathers(latency_share=1e-4), gm, FAKE, costs=costs).changed == 3


def test_what_is_small_joins_until_the_bucket_is_large():
    def function(x, *shards):
        return tuple(gather(shard, (2 * shard.shape[0], 4)) * x for shard in shards)

    gm = _lowered(function, [torch.randn(4), *(torch.randn(rows, 4) for rows in (1, 1, 100, 1, 1))], FAKE)
    # A latency carries 64 bytes; a bucket of them grows to four times that.
    run_pass(BucketForwardGathers(), gm, FAKE, costs=_costs(1.0, 64.0, (FAKE,)))
    assert [len(results_of(started)) for started in collectives(gm)] == [2, 1, 2]


MIB = 2**20


@pytest.mark.parametrize(
    ("backend", "how", "bucket", "sizes"),
    [
        ("nccl", {}, {}, [25, 5]),  # 250 of 256 MiB
        ("nccl", {"keep_bytes": 10**9}, {}, [25, 5]),
        ("nccl", {"keep_bytes": 0}, {"latency_share": 0.0}, [2] * 15),
        ("nccl", {}, {"bucket_bytes": 45 * MIB}, [4] * 7 + [2]),
        ("gloo", {}, {"latency_share": 0.0}, [2] * 15),
    ],
)
def test_on_nccl_a_bucket_has_4_mib_for_each_rank_if_there_is_memory(backend, how, bucket, sizes):
    """However fast the link is; the user's own limit counts more."""

    def function(x, *shards):
        return tuple(gather(shard, (64 * shard.shape[0], 4)).sum() * x for shard in shards)

    axis = MeshAxis("shard", 64, "0", backend)
    gm = _lowered(function, [torch.ones(1), *(torch.ones(10 * MIB // (64 * 4 * 4), 4) for _ in range(30))], axis)
    run_pass(BucketForwardGathers(**bucket), gm, axis, costs=_costs(1e-12, 1e30, (axis,)), **how)
    assert [len(results_of(started)) for started in collectives(gm)] == sizes


def test_predicted_times_of_computation_do_not_decide():
    """They differ from rank to rank, and ranks that form other buckets wait for each other for ever."""
    found = set()
    for batch in (1, 1000):
        gm = _lowered(_three_layers, [torch.randn(batch, 4), *_inputs()[1:]])
        run_pass(BucketForwardGathers(), gm, memory_limit=batch)
        found.add(str(_members(gm)))
    assert len(found) == 1


@BOTH
def test_a_second_run_changes_nothing(bucket):
    def function(x, *shards):
        return tuple(gather(shard, (2 * shard.shape[0], 4)) * x for shard in shards)

    # The first and the last would fit together, if the bucket between them did not count.
    gm = _lowered(function, [torch.randn(4), *(torch.randn(rows, 4) for rows in (6, 5, 5, 4))])
    bucket = type(bucket)(bucket_bytes=10 * 32)
    assert run_pass(bucket, gm).changed == 2
    before = code(gm)
    assert run_pass(bucket, gm).changed == 0
    assert code(gm) == before


def test_they_need_the_collectives_and_come_before_prefetching():
    with pytest.raises(PassError, match="bucket_forward_gathers requires 'zero-collectives'"):
        Pipeline([BucketForwardGathers()])
    lowered = [InsertZeroCollectives()]
    with pytest.raises(PassError, match="bucket_forward_gathers must run before prefetch_forward_gathers"):
        Pipeline([*lowered, PrefetchForwardGathers(), BucketForwardGathers()])
    with pytest.raises(PassError, match="bucket_backward_gathers must run before prefetch_backward_gathers"):
        Pipeline([*lowered, PrefetchBackwardGathers(), BucketBackwardGathers()])
    Pipeline([*lowered, BucketForwardGathers(), PrefetchForwardGathers(), BucketBackwardGathers()])


# What other passes and analyses make of a bucket


def _four_layers(x, a, b, c, d):
    for shard in (a, b, c, d):
        x = torch.mm(x, gather(shard, (4, 4))).sin()
    return (x,)


def _two_buckets(**how):
    gm = _lowered(_four_layers, [torch.randn(2, 4) for _ in range(5)])
    assert run_pass(BucketForwardGathers(bucket_bytes=2 * 64), gm, **how).changed == 4
    assert _members(gm) == [["a", "b"], ["c", "d"]]
    return gm


def test_the_next_bucket_starts_as_the_first_of_the_last_one_has_arrived():
    gm = _two_buckets()
    assert run_pass(PrefetchForwardGathers(), gm).changed == 1
    FileCheck().check("coalesced.default([a_1, b_1]").check("wait_tensor").check_next(
        "coalesced.default([c_1, d_1]"
    ).check_next("mm").run(code(gm))


def test_in_the_backward_the_next_bucket_starts_when_the_last_one_is_done_with():
    def function(dz, y, a, b, c, d):
        for shard in (a, b):
            dz = torch.mm(dz, gather(shard, (4, 4)).t()).sin()
        grad = torch.mm(y.t(), dz)
        for shard in (c, d):
            dz = torch.mm(dz, gather(shard, (4, 4)).t()).sin()
        return grad, dz

    gm = _lowered(function, [torch.randn(2, 4) for _ in range(6)])
    assert run_pass(BucketBackwardGathers(bucket_bytes=2 * 64), gm).changed == 4
    run_pass(PrefetchBackwardGathers(), gm, costs=_costs(1e-12, 1e30))
    first, second = collectives(gm)
    last_use = find_calls(gm, aten.mm.default)[1]
    assert waits_of(first)[-1] < last_use < second < find_calls(gm, aten.mm.default)[2]


@pytest.mark.parametrize("ahead_bytes", [128, 256])
def test_what_is_gathered_ahead_stays_within_bounds(ahead_bytes):
    def function(x, a, b, c, d, e):
        for _ in range(8):
            x = x.sin()
        for shard in (a, b, c, d):
            x = torch.mm(x, gather(shard, (4, 4))).sin()
        return (torch.mm(x, gather(e, (4, 24))),)

    gm = _lowered(function, [*(torch.randn(2, 4) for _ in range(5)), torch.randn(2, 24)])
    run_pass(BucketForwardGathers(bucket_bytes=2 * 64), gm)
    # Kernels of a second, two buckets of three, and one gather of nine: in time only if the second bucket is early.
    costs = CostModel(Device(1e30, 1e30, kernel_s=1.0), (SHARD,), {"0": Link(1e-9, 64 / 3)})
    run_pass(PrefetchForwardGathers(ahead_bytes=ahead_bytes), gm, costs=costs)
    first, second, _ = collectives(gm)
    assert (second < waits_of(first)[0]) == (ahead_bytes == 256)


def test_a_bucket_counts_until_its_last_member_is_waited_for():
    def function(x, a, b, c, d, e):
        for _ in range(8):
            x = x.sin()
        for shard in (a, b, c, d):
            x = torch.mm(x, gather(shard, (4, 4))).sin()
        return (torch.mm(x, gather(e, (4, 18))),)

    def starts_before_the_last_wait(ahead_bytes):
        gm = _lowered(function, [*(torch.randn(2, 4) for _ in range(5)), torch.randn(2, 18)])
        run_pass(BucketForwardGathers(bucket_bytes=2 * 64), gm)
        # The last gather takes 6.75 seconds, so that it is best started between the waits for the first bucket.
        costs = CostModel(Device(1e30, 1e30, kernel_s=1.0), (SHARD,), {"0": Link(1e-9, 64 / 3)})
        run_pass(PrefetchForwardGathers(ahead_bytes=ahead_bytes), gm, costs=costs)
        first, _, third = collectives(gm)
        assert waits_of(first)[0] < third
        return third < waits_of(first)[1]

    assert starts_before_the_last_wait(128 + 128 + 288)
    assert not starts_before_the_last_wait(128 + 288)


def test_all_of_a_bucket_is_there_when_it_is_through():
    gm = _lowered()
    run_pass(BucketForwardGathers(), gm)
    schedule = predict(list(gm.graph.nodes), CostModel(Device(1e30, 1e30, 1.0), (SHARD,), {"0": Link(5.0, 1e30)}))
    first, second, third = waits_of(*collectives(gm))
    assert [schedule.begins[wait] for wait in (first, second, third)] == pytest.approx([5.0, 7.0, 9.0])


def test_a_collective_delays_what_is_computed_beside_it():
    gm = _lowered()
    nodes = list(gm.graph.nodes)
    free, slow = (CostModel(Device(1e30, 1e30, 1.0), (SHARD,), {"0": Link(5.0, 1e30, each)}) for each in (0.0, 0.5))
    first, second, _ = collectives(gm)
    begins = [predict(nodes, costs, unwaited={first}).begins[second] for costs in (free, slow)]
    assert begins[1] - begins[0] == pytest.approx(0.5 * 5.0)


def test_the_costs_are_those_of_one_start_and_all_bytes():
    costs = _costs(1.0, 32.0)
    gm = _lowered()
    alone = [costs.seconds(node) for node in collectives(gm)]
    run_pass(BucketForwardGathers(latency_share=0.0), gm, costs=costs)
    (bucket,) = collectives(gm)
    assert alone == [2.0, 2.0, 2.0]
    assert costs.seconds(bucket) == 1.0 + 3.0


def test_each_member_is_freed_by_itself():
    gm = _lowered()
    run_pass(BucketForwardGathers(), gm)
    memory = simulate(gm)
    (bucket,) = collectives(gm)
    pieces = [piece for piece in memory.pieces if piece.node.partition(":")[0] == bucket.name]
    assert [piece.bytes for piece in pieces] == [64, 64, 64]
    uses = [next(iter(wait.users)).name for wait in waits_of(bucket)]
    assert [memory.nodes[piece.last] for piece in pieces] == uses


def test_the_order_of_collectives_names_all_parameters():
    gm = _two_buckets()
    params = {f"{name}_1": ParameterSpec(name, (4, 4), (2, 4), torch.float32, "0", True) for name in "abcd"}
    ctx = PassContext(phase=Phase.FORWARD, axes=(SHARD,), params=params)
    first, _ = collective_lines(gm, ctx)
    assert first.endswith("[4, 4] torch.float32, [4, 4] torch.float32 over shard of a and of b")


def test_a_kept_parameter_may_share_a_bucket_and_no_other_of_it_is_saved():
    """The verifier tells the members of a bucket apart."""
    gm = _lowered()
    (output,) = gm.graph.find_nodes(op="output")
    waits = [collective.next for collective in collectives(gm)]
    waits[-1].meta[KEPT] = True
    output.args = ((*output.args[0], waits[-1]),)
    assert run_pass(BucketForwardGathers(), gm, user_outputs=1).changed == 3
    assert len({collective_behind(wait) for wait in waits}) == 1
    output.args = ((*output.args[0], waits[0]),)
    with pytest.raises(PassError, match="saves the full parameter that getitem gathers"):
        run_pass(PrefetchForwardGathers(), gm, user_outputs=1)
