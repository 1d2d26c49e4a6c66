from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes import PassContext, PassError, Phase, Pipeline, Runner, graph_pass
from dsgraph.passes.ir.coalesced import results_of, waits_of
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.ir.graph import emit, find_calls, placeholders, replace_and_erase, wait_of
from dsgraph.passes.overlap.bucket_reductions import BucketReductions
from dsgraph.passes.overlap.delay_reduction_waits import DelayReductionWaits
from dsgraph.passes.zero.bucket_small_reductions import BucketSmallReductions
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from dsgraph.passes.zero.keep_last_gather import KeepLastGather
from tests.passes import faults
from tests.passes.faults import aten, c10d, joint, run
from tests.passes.tracing import GLOO, OUTER, SHARD, gather, reduce, run_pass, trace, unknown

CHANGES = {"changes_collectives": True}


@pytest.mark.parametrize(
    ("fault", "declared", "message"),
    [
        (faults.remove_an_input, {}, r"changed the graph's inputs from .*tangents"),
        (
            faults.change_what_an_input_is,
            {},
            r"changed input 'a_1' from float32\[2, 4\] on cpu to float64\[2, 4\] on cpu",
        ),
        (faults.swap_outputs, {}, r"made output 1 of (\w+), which is output 2, though \w+ is still in the graph"),
        (faults.change_an_outputs_dtype, {}, r"changed output 0 from float32\[\] on cpu to float64\[\] on cpu"),
        (faults.change_an_outputs_shape, {}, r"changed output 0 from float32\[\] on cpu to float32\[1\] on cpu"),
        (faults.clone_a_returned_view, {}, r"changed output 3, which was 'x_1', to a tensor of its own"),
        (faults.return_an_input_instead, {}, r"changed output 1, which was a tensor of its own, to 'a_1'.*clone it"),
        (faults.forget_a_fake_value, {}, r"left node mul_tensor_1 \(aten.mul.Tensor\) without meta\['val'\]"),
        (faults.read_before_the_wait, {}, r"all_gather_into_tensor_default has 1 waits and 2 users"),
        (faults.write_to_a_buffer_in_flight, {}, r"mul_\w* writes to \w+ while collective reduce_scatter_\w+ is under"),
        (faults.duplicate_a_reduction, {}, r"added all_reduce.* without declaring changes_collectives"),
        (
            faults.duplicate_a_reduction,
            CHANGES,
            r"output 1, a gradient, is summed over from group '0' to .*'0' 2 times",
        ),
        (faults.drop_a_reduction, {}, r"removed reduce_scatter_tensor_default .* without declaring"),
        (faults.drop_a_reduction, CHANGES, r"output 1, a gradient, is summed over from group '0' to nothing"),
        (faults.reduce_over_the_wrong_group, {}, r"changed collective reduce_scatter_tensor_default from .*'0'.*'1'"),
        (faults.reduce_over_the_wrong_group, CHANGES, r"is summed over from group '0' to group '1'"),
        (faults.change_the_reduce_op, {}, r"changed collective reduce_scatter_tensor_default from .*sum.*max"),
        (faults.change_the_reduce_op, CHANGES, r"is summed over from group '0' to group '0' \(max\)"),
        (faults.gather_over_the_wrong_group, {}, r"changed collective all_gather_into_tensor_default"),
        (faults.gather_over_the_wrong_group, CHANGES, r"over which input 'a_1' is gathered from \['0'\] to \['1'\]"),
        (faults.gather_another_parameter, {}, r"over which input 'a_1' is gathered from \['0'\] to none"),
        (faults.exchange_without_adding_up, CHANGES, r"from group '0' to exchanged over group '0'"),
        (faults.bucket_a_reduced_gradient, CHANGES, r"output 1, a gradient, .* from group '0' to group '0' 2 times"),
        (faults.untag_a_gather, {}, r"keeps the gathered parameter of wait_tensor_default for the backward"),
        (faults.save_a_gather, {}, r"keeps the gathered parameter of wait_tensor_default .* declare keeps_gathers"),
        (faults.view_a_gather_without_a_tag, {}, r"keeps the gathered parameter of view_default"),
        (faults.make_a_gather_anew_without_a_tag, {}, r"keeps the gathered parameter of a_1"),
        (faults.drop_a_write, {}, r"writes to input 'buffer_1' from 1 to 0 times \(gone: copy_"),
        (faults.write_twice, {}, r"writes to input 'buffer_1' from 1 to 2 times \(new: copy_"),
        (faults.move_a_read_across_a_write, {}, r"moved sum_1 \(sum.default\) across copy_ .* memory of buffer_1"),
        (faults.read_after_the_release, {}, r"reads memory that resize_storage_bytes_\w* gave back"),
        (faults.read_a_view_after_its_base_was_emptied, {}, r"mm reads memory that set__default gave back"),
        (
            faults.move_a_collective_across_a_barrier,
            {},
            r"moved wait_tensor\w+ .* across copy_ .*writes to an argument",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", "declared" if value == CHANGES else ""),
)
def test_a_fault_is_caught_and_named(fault, declared, message):
    with pytest.raises(PassError, match=rf"pass {fault.__name__}[ ,].*{message}"):
        run(fault, joint(), **declared)


def test_a_marker_that_is_left_is_named():
    with pytest.raises(PassError, match=r"after pass leave_a_marker, marker gather_param\w* .* is in the graph"):
        run(faults.leave_a_marker, joint(lowered=False), provides={"zero-collectives"}, changes_collectives=True)


def test_a_marker_that_a_later_pass_adds_is_named():
    def add_a_marker(gm, ctx):
        loss, *rest = faults._returned(gm)
        options = {"dtype": torch.float32, "reduce_dtype": torch.float32, "group": "", "outer_groups": []}
        marker = emit(faults._output(gm), torch.ops.dsgraph.gather_param.default, loss, None, [], **options)
        return faults._return(gm, marker, *rest)

    passes = Pipeline([InsertZeroCollectives(), graph_pass(phase="joint", changes_collectives=True)(add_a_marker)])
    with pytest.raises(PassError, match="after pass add_a_marker, marker gather_param"):
        Runner(passes).run(joint(lowered=False), PassContext(phase=Phase.JOINT, axes=(SHARD,)))


def _saving(*, view: bool):
    """A forward graph that saves its input, of the shape of a gathered weight."""

    def forward(x, a):
        weight = c10d.wait_tensor(c10d.all_gather_into_tensor(a, 2, "0"))
        y = torch.mm(x, weight)
        return y.sum(), y

    gm = trace(forward, torch.randn(4, 4), torch.randn(2, 4))
    for node in (*collectives(gm), *map(wait_of, collectives(gm))):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def save_the_weight(gm, ctx):
        output, wait = faults._output(gm), wait_of(collectives(gm)[0])
        loss, _ = output.args[0]
        output.args = ((loss, emit(output, aten.view.default, wait, [4, 4]) if view else wait),)
        return 1

    return gm, save_the_weight


@pytest.mark.parametrize("view", [False, True])
def test_a_gathered_weight_among_what_is_saved(view):
    gm, save_the_weight = _saving(view=view)
    with pytest.raises(PassError, match=r"after pass save_the_weight, output 1 .* saves the full parameter"):
        run(save_the_weight, gm, phase="forward", user_outputs=1)


def test_a_gathered_weight_that_the_model_returns_is_its_own_business():
    gm, save_the_weight = _saving(view=True)
    run(save_the_weight, gm, phase="forward", user_outputs=2)


def test_what_the_partitioner_makes_is_checked_too():
    gm, save_the_weight = _saving(view=False)
    save_the_weight(gm, None)
    with pytest.raises(PassError, match=r"after the partitioner, output 1"):
        run(lambda gm, ctx: 0, gm, phase="forward", user_outputs=1)


def test_a_partitioner_that_loses_a_reduction_is_named():
    runner = Runner(Pipeline([InsertZeroCollectives()]))
    runner.run(joint(lowered=False), PassContext(phase=Phase.JOINT, axes=(SHARD,)))
    backward = trace(lambda tangents_1: (tangents_1 * 2, tangents_1 * 3, tangents_1), torch.randn(2, 4))
    with pytest.raises(PassError, match=r"the partitioner changed what output 0, a gradient, is summed over"):
        runner.run(backward, PassContext(phase=Phase.BACKWARD, axes=(SHARD,)))


def test_an_unknown_op_is_a_barrier():
    def function(x, y):
        first = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))
        z = unknown(y)
        return first, c10d.wait_tensor(c10d.all_reduce(y, "sum", "0")), z

    def start_early(gm, ctx):
        collectives(gm)[0].prepend(collectives(gm)[1])
        return 1

    gm = trace(function, torch.randn(3), torch.randn(3))
    with pytest.raises(PassError, match=r"moved all_reduce_1 .* across unknown .*, which may do anything"):
        run(start_early, gm, reorders_collectives=True)


def test_reads_and_writes_of_an_intermediate_keep_their_order():
    def function(x):
        y = x * 2
        view = y.view(-1)
        before = view.sin()
        aten.mul_.Tensor(y, 3)
        return before, view.cos()

    def read_late(gm, ctx):
        find_calls(gm, aten.cos.default)[0].append(find_calls(gm, aten.sin.default)[0])
        return 1

    gm = trace(function, torch.randn(2, 2))
    with pytest.raises(PassError, match=r"pass read_late moved sin \(sin.default\) across mul_ .* memory of mul"):
        run(read_late, gm)


def test_writes_to_one_tensor_keep_their_order():
    def function(x):
        aten.mul_.Tensor(x, 3)
        aten.add_.Tensor(x, 1)
        return (x.sin(),)

    def swap_writes(gm, ctx):
        add, mul = find_calls(gm, aten.add_.Tensor)[0], find_calls(gm, aten.mul_.Tensor)[0]
        add.replace_input_with(mul, mul.args[0])
        add.append(mul)
        return 1

    with pytest.raises(PassError, match=r"pass swap_writes moved \w+ .* across"):
        run(swap_writes, trace(function, torch.randn(2)))


def _bucketed(write=None):
    """A bucket of two gathers; `write` is called between the waits for its members, with the shards."""

    def function(x, a, b):
        first, second = c10d.all_gather_into_tensor_coalesced([a, b], 2, "0")
        y = torch.mm(x, c10d.wait_tensor(first))
        if write is not None:
            write(a, b)
        return (torch.mm(y, c10d.wait_tensor(second)),)

    return trace(function, torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4))


def test_each_member_of_a_bucket_has_a_wait():
    def forget_one(gm, ctx):
        (bucket,) = collectives(gm)
        last = waits_of(bucket)[-1]
        replace_and_erase(last, waits_of(bucket)[0])
        return 1

    with pytest.raises(PassError, match=r"after pass forget_one, collective \w+ has 2 results, of which 1 are read"):
        run(forget_one, _bucketed())


def test_a_member_of_a_bucket_is_not_read_before_its_own_wait():
    def read_early(gm, ctx):
        (bucket,) = collectives(gm)
        find_calls(gm, aten.mm.default)[1].replace_input_with(waits_of(bucket)[1], results_of(bucket)[1])
        return 1

    with pytest.raises(PassError, match=r"after pass read_early, collective \w+ has 1 waits and 2 users"):
        run(read_early, _bucketed())


@pytest.mark.parametrize(("position", "is_fault"), [(0, False), (1, True)], ids=["waited for", "under way"])
def test_only_a_members_own_shard_is_in_flight_until_its_wait(position, is_fault):
    def change_a_shard(gm, ctx):
        (bucket,) = collectives(gm)
        emit(waits_of(bucket)[1], aten.mul_.Tensor, placeholders(gm)[1 + position], 2)
        return 1

    if is_fault:
        with pytest.raises(PassError, match=r"mul_\w* writes to b_1 while collective \w+ is under way with it"):
            run(change_a_shard, _bucketed())
    else:  # what is wrong with it is only that it is a write too many
        with pytest.raises(PassError, match=r"changed how often the graph writes to input 'a_1' from 0 to 1"):
            run(change_a_shard, _bucketed())


def test_gradients_of_one_bucket_have_each_its_own_sums():
    def function(x, y, tangents_1):
        summed = c10d.wait_tensor(c10d.all_reduce(x * tangents_1, "sum", "1"))
        return reduce(summed, (2, 4)), reduce(y * tangents_1, (2, 4))

    gm = trace(function, *(torch.randn(4, 4) for _ in range(3)))
    run_pass(InsertZeroCollectives(), gm, SHARD, OUTER)
    assert run_pass(BucketReductions(), gm, SHARD, OUTER).changed == 2

    def swap_what_they_read(gm, ctx):
        bucket = collectives(gm)[-1]
        bucket.args = (bucket.args[0][::-1], *bucket.args[1:])
        return 1

    with pytest.raises(PassError, match=r"output 0, a gradient, .* from group '0' and group '1' to group '0'"):
        run(swap_what_they_read, gm, phase="backward", axes=(SHARD, OUTER), **CHANGES)


def test_verify_can_be_switched_off():
    gm = joint()
    pipeline = Pipeline([graph_pass(phase="joint")(faults.drop_a_write)])
    runner = Runner(pipeline, verify=False)
    runner.run(gm, PassContext(phase=Phase.JOINT, axes=(OUTER, SHARD)))
    assert not find_calls(gm, aten.copy_.default)
    assert runner.records[0].verify_seconds < 0.1, "nothing is checked"


def test_the_time_that_it_takes_is_recorded():
    runner = Runner(Pipeline([InsertZeroCollectives(), KeepLastGather()]))
    runner.run(joint(lowered=False), PassContext(phase=Phase.JOINT, axes=(SHARD,)))
    assert all(record.verify_seconds > 0 for record in runner.records)


# False alarms are as bad: what is right must not be refused.


def drop_a_cast(gm, ctx):
    loss, *rest = faults._returned(gm)
    wide = emit(faults._output(gm), aten._to_copy.default, loss, dtype=torch.float64)
    narrow = emit(faults._output(gm), aten._to_copy.default, wide, dtype=torch.float32)
    faults._return(gm, narrow, *rest)
    replace_and_erase(narrow, loss)
    return 1


def merge_equal_computations(gm, ctx):
    first, second = find_calls(gm, aten.t.default)[:2]
    again = emit(second, first.target, *first.args)
    again.meta["recompute"] = first.meta.get("recompute")
    replace_and_erase(again, first)
    return 1


def wait_later(gm, ctx):
    reduction = faults._reductions(gm)[0]
    wait_of(reduction).prev.append(find_calls(gm, aten.sum.default)[-1])
    return 1


def make_a_collective_anew(gm, ctx):
    started = faults._reductions(gm)[0]
    replace_and_erase(started, emit(started, started.target, *started.args))
    return 1


def write_the_same_in_another_way(gm, ctx):
    write = find_calls(gm, aten.copy_.default)[0]
    emit(write, aten.lerp_.Scalar, write.args[0], placeholders(gm)[0], 0.1)
    gm.graph.erase_node(write)
    return 1


def move_a_view_across_a_write(gm, ctx):
    write = find_calls(gm, aten.copy_.default)[0]
    view = emit(write, aten.view.default, write.args[0], [16])
    write.append(view)
    return 1


def move_another_read_across_a_write(gm, ctx):
    find_calls(gm, aten.copy_.default)[0].prepend(find_calls(gm, aten.sum.default)[-1])
    return 1


def release_behind_the_last_use(gm, ctx):
    wait = wait_of(faults._gathers(gm)[0])
    max(wait.users).append(emit(max(wait.users).next, torch.ops.inductor.resize_storage_bytes_.default, wait, 0))
    return 1


def release_and_take_back(gm, ctx):
    resize = torch.ops.inductor.resize_storage_bytes_.default
    wait = wait_of(faults._gathers(gm)[0])
    use = min(wait.users)
    emit(use, resize, wait, 0)
    emit(use, resize, wait, 64)
    return 1


def add_weight_decay(gm, ctx):
    loss, own_a, *rest = faults._returned(gm)
    decay = emit(faults._output(gm), aten.mul.Tensor, placeholders(gm)[1], 0.01)
    return faults._return(gm, loss, emit(faults._output(gm), aten.add.Tensor, own_a, decay), *rest)


def clone_an_output(gm, ctx):
    loss, *rest = faults._returned(gm)
    return faults._return(gm, emit(faults._output(gm), aten.clone.default, loss), *rest)


def reduce_in_two_parts(gm, ctx):
    started = faults._reductions(gm)[0]
    wait = wait_of(started)
    whole = emit(started, c10d.wait_tensor.default, emit(started, c10d.all_reduce.default, started.args[0], "sum", "0"))
    replace_and_erase(wait, emit(started, aten.slice.Tensor, whole, 0, 0, 2))
    gm.graph.erase_node(started)
    return 1


@pytest.mark.parametrize(
    ("harmless", "declared"),
    [
        (drop_a_cast, {}),
        (merge_equal_computations, {}),
        (wait_later, {}),
        (make_a_collective_anew, {}),
        (write_the_same_in_another_way, {}),
        (move_a_view_across_a_write, {}),
        (move_another_read_across_a_write, {}),
        (release_behind_the_last_use, {}),
        (release_and_take_back, {}),
        (add_weight_decay, {}),
        (clone_an_output, {}),
        (reduce_in_two_parts, CHANGES),
        (faults.save_a_gather, {"keeps_gathers": True}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_right_is_not_refused(harmless, declared):
    run(harmless, joint(), **declared)


@pytest.mark.parametrize("axes", [(SHARD,), (GLOO,), (OUTER, SHARD)], ids=["nccl", "gloo", "two axes"])
def test_the_joint_passes_are_not_refused(axes):
    passes = Pipeline([InsertZeroCollectives(), ChooseCollectiveAlgorithms(), KeepLastGather()])
    gm = joint(lowered=False)
    Runner(passes).run(gm, PassContext(phase=Phase.JOINT, axes=axes))
    assert collectives(gm)


def test_buckets_keep_the_histories_of_their_parts():
    """A gradient that a user's own collective has summed before shares a bucket with one that none has."""

    def function(x, tangents_1):
        summed = c10d.wait_tensor(c10d.all_reduce(tangents_1 * x, "sum", "0"))
        how = {"group": "", "outer_groups": ["0"]}
        return reduce(summed, (3,), **how), reduce(tangents_1 * 2, (3,), **how)

    gm = trace(function, torch.randn(3), torch.randn(3))
    passes = Pipeline([BucketSmallReductions(), InsertZeroCollectives()])
    Runner(passes).run(gm, PassContext(phase=Phase.JOINT, axes=(SHARD,)))
    assert len(find_calls(gm, c10d.all_reduce.default)) == 2


def test_what_the_model_itself_does_is_held_against_no_pass():
    def function(x):
        started = c10d.all_reduce(x, "sum", "0")
        return c10d.wait_tensor(started), c10d.wait_tensor(started)

    run(lambda gm, ctx: 0, trace(function, torch.randn(3)))


def test_several_tensors_at_once_are_waited_for_one_by_one():
    def function(x, y):
        first, second = c10d.all_reduce_coalesced([x, y], "sum", "0")
        return c10d.wait_tensor(first), c10d.wait_tensor(second)

    def drop_one_wait(gm, ctx):
        wait = find_calls(gm, c10d.wait_tensor.default)[0]
        replace_and_erase(wait, wait.args[0])
        return 1

    gm = trace(function, torch.randn(3), torch.randn(3))
    run(lambda gm, ctx: 0, gm)
    with pytest.raises(PassError, match=r"after pass drop_one_wait, collective all_reduce_coalesced has 0 waits"):
        run(drop_one_wait, gm)


def test_a_collective_in_place_is_neither_read_nor_written_before_its_wait():
    def function(x):
        y = x * 2
        done = c10d.wait_tensor(c10d.all_reduce_(y, "sum", "0"))
        return done, x.sin()

    def read_in_flight(gm, ctx):
        started, sin = find_calls(gm, c10d.all_reduce_.default)[0], find_calls(gm, aten.sin.default)[0]
        started.append(sin)
        sin.args = (started.args[0],)
        return 1

    gm = trace(function, torch.randn(3))
    run(lambda gm, ctx: 0, gm)
    with pytest.raises(PassError, match=r"sin reads mul while collective all_reduce_ is under way"):
        run(read_in_flight, gm)


def test_a_returned_parameter_is_a_tensor_of_its_own():
    def function(a, gathered_copy, tangents_1):
        whole = gather(a, (2, 4), group="")
        return gather(a, (4, 4), gathered_copy).t(), whole * 2, whole.view(8), reduce(tangents_1, (2, 4), group="")

    gm = trace(function, torch.randn(2, 4), torch.randn(4, 4), torch.randn(2, 4))
    run_pass(InsertZeroCollectives(), gm)
    assert len(find_calls(gm, aten.clone.default)) == 3


def test_waits_stop_at_barriers():
    def function(x, y, buffer):
        own = reduce(x, (2, 3))
        aten.copy_.default(buffer, y)
        return own, reduce(aten.mul.Tensor(y, 3), (2, 3))

    gm = trace(function, torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3))
    run_pass(InsertZeroCollectives(), gm)
    first = wait_of(collectives(gm)[0])
    run_pass(DelayReductionWaits(), gm)
    assert first < find_calls(gm, aten.copy_.default)[0] < collectives(gm)[1]
