"""Graphs, and passes that each do one wrong thing to them."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes import PassContext, Phase, Pipeline, Runner, graph_pass
from dsgraph.passes.ir.graph import emit, find_calls, placeholders, replace_and_erase, wait_of
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes.tracing import OUTER, SHARD, gather, reduce, run_pass, trace

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
inductor = torch.ops.inductor


def step(x, a, b, buffer, tangents_1):
    """Forward and backward of two layers with shards `a` and `b`; `buffer` follows the mean of what comes in."""
    full_a, full_b = gather(a, (4, 4)), gather(b, (4, 4))
    mean = aten.add.Tensor(aten.mul.Tensor(buffer, 0.9), aten.mul.Tensor(x, 0.1))
    y = aten.mm.default(x, full_a)
    level = aten.sum.default(buffer)
    z = aten.mm.default(y, full_b)
    dz = aten.mul.Tensor(z, tangents_1)
    db = aten.mm.default(aten.t.default(y), dz)
    dy = aten.mm.default(dz, aten.t.default(full_b))
    da = aten.mm.default(aten.t.default(x), dy)
    own_a, own_b = reduce(da, (2, 4)), reduce(db, (2, 4))
    aten.copy_.default(buffer, mean)
    loss = aten.add.Tensor(aten.sum.default(z), level)
    return loss, own_a, own_b, aten.view.default(x, [4, 4])


def inputs():
    return torch.randn(4, 4), torch.randn(2, 4), torch.randn(2, 4), torch.randn(4, 4), torch.tensor(1.0)


def joint(*, lowered: bool = True, axes=(OUTER, SHARD)) -> GraphModule:
    gm = trace(step, *inputs())
    if lowered:
        run_pass(InsertZeroCollectives(), gm, *axes)
    return gm


def run(function, gm, *, phase: str = "joint", axes=(OUTER, SHARD), user_outputs: int | None = None, **declared):
    ctx = PassContext(phase=Phase(phase), axes=axes, user_outputs=user_outputs)
    Runner(Pipeline([graph_pass(phase=phase, **declared)(function)])).run(gm, ctx)


def _output(gm: GraphModule) -> Node:
    return gm.graph.find_nodes(op="output")[0]


def _return(gm: GraphModule, *values: object) -> int:
    _output(gm).args = (tuple(values),)
    return 1


def _returned(gm: GraphModule) -> list[Node]:
    return list(_output(gm).args[0])


def _reductions(gm: GraphModule) -> list[Node]:
    return find_calls(gm, c10d.reduce_scatter_tensor.default)


def _gathers(gm: GraphModule) -> list[Node]:
    return find_calls(gm, c10d.all_gather_into_tensor.default)


# What a graph takes and returns


def remove_an_input(gm, ctx):
    first, *_, last = placeholders(gm)
    replace_and_erase(last, first)
    return 1


def change_what_an_input_is(gm, ctx):
    shard = placeholders(gm)[1]
    shard.meta["val"] = shard.meta["val"].double()
    return 1


def swap_outputs(gm, ctx):
    loss, own_a, own_b, view = _returned(gm)
    return _return(gm, loss, own_b, own_a, view)


def change_an_outputs_dtype(gm, ctx):
    loss, *rest = _returned(gm)
    return _return(gm, emit(_output(gm), aten._to_copy.default, loss, dtype=torch.float64), *rest)


def change_an_outputs_shape(gm, ctx):
    loss, *rest = _returned(gm)
    return _return(gm, emit(_output(gm), aten.unsqueeze.default, loss, 0), *rest)


def clone_a_returned_view(gm, ctx):
    *rest, view = _returned(gm)
    return _return(gm, *rest, emit(_output(gm), aten.clone.default, view))


def return_an_input_instead(gm, ctx):
    loss, _, *rest = _returned(gm)
    return _return(gm, loss, emit(_output(gm), aten.view.default, placeholders(gm)[1], [2, 4]), *rest)


def forget_a_fake_value(gm, ctx):
    loss = _returned(gm)[0]
    with gm.graph.inserting_after(loss):
        again = gm.graph.call_function(aten.mul.Tensor, (loss, 1))
    again.meta["val"] = loss.meta["val"]
    with gm.graph.inserting_after(again):
        nameless = gm.graph.call_function(aten.mul.Tensor, (again, 1))
    _output(gm).replace_input_with(loss, nameless)
    return 1


# Waits


def read_before_the_wait(gm, ctx):
    started = _gathers(gm)[0]
    find_calls(gm, aten.mm.default)[0].replace_input_with(wait_of(started), started)
    return 1


def write_to_a_buffer_in_flight(gm, ctx):
    started = _reductions(gm)[0]
    emit(wait_of(started), aten.mul_.Tensor, started.args[0], 2)
    return 1


# Collectives


def duplicate_a_reduction(gm, ctx):
    wait = wait_of(_reductions(gm)[0])
    (average,) = wait.users
    started = emit(average, c10d.all_reduce.default, wait, "sum", "0")
    average.replace_input_with(wait, emit(average, c10d.wait_tensor.default, started))
    return 1


def drop_a_reduction(gm, ctx):
    started = _reductions(gm)[0]
    replace_and_erase(wait_of(started), emit(started, aten.slice.Tensor, started.args[0], 0, 0, 2))
    gm.graph.erase_node(started)
    return 1


def reduce_over_the_wrong_group(gm, ctx):
    started = _reductions(gm)[0]
    started.args = (*started.args[:3], "1")
    return 1


def change_the_reduce_op(gm, ctx):
    started = _reductions(gm)[0]
    started.args = (started.args[0], "max", *started.args[2:])
    return 1


def gather_over_the_wrong_group(gm, ctx):
    started = _gathers(gm)[0]
    started.args = (*started.args[:2], "1")
    return 1


def gather_another_parameter(gm, ctx):
    first, second = _gathers(gm)
    first.replace_input_with(first.args[0], second.args[0])
    return 1


def exchange_without_adding_up(gm, ctx):
    started = _reductions(gm)[0]
    wait = wait_of(started)
    sent = emit(wait, c10d.all_to_all_single.default, started.args[0], [2, 2], [2, 2], "0")
    received = emit(wait, c10d.wait_tensor.default, sent)
    replace_and_erase(wait, emit(wait, aten.slice.Tensor, received, 0, 0, 2))
    gm.graph.erase_node(started)
    return 1


def bucket_a_reduced_gradient(gm, ctx):
    """Bucket two gradients for one more reduction, though the first of them is reduced already."""
    loss, own_a, own_b, view = _returned(gm)
    at = _output(gm)
    flat = [emit(at, aten.reshape.default, grad, [-1]) for grad in (own_a, own_b.args[0])]
    sums = emit(at, c10d.all_reduce.default, emit(at, aten.cat.default, flat), "sum", "0")
    sums = emit(at, c10d.wait_tensor.default, sums)
    parts = [emit(at, aten.slice.Tensor, sums, 0, start, start + 8) for start in (0, 8)]
    own = [emit(at, aten.view.default, part, [2, 4]) for part in parts]
    return _return(gm, loss, own[0], own_b, view)


def leave_a_marker(gm, ctx):
    """Provide what a lowering provides, and lower nothing."""
    return 0


# What the backward gathers again


def untag_a_gather(gm, ctx):
    wait_of(_gathers(gm)[0]).meta.pop("recompute")
    return 1


def save_a_gather(gm, ctx):
    wait_of(_gathers(gm)[0]).meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return 1


def view_a_gather_without_a_tag(gm, ctx):
    wait = wait_of(_gathers(gm)[0])
    use = find_calls(gm, aten.mm.default)[0]
    use.replace_input_with(wait, emit(use, aten.view.default, wait, [4, 4]))
    return 1


def make_a_gather_anew_without_a_tag(gm, ctx):
    started = _gathers(gm)[0]
    replace_and_erase(started, emit(started, started.target, *started.args))
    return 1


# Memory


def drop_a_write(gm, ctx):
    gm.graph.erase_node(find_calls(gm, aten.copy_.default)[0])
    return 1


def write_twice(gm, ctx):
    write = find_calls(gm, aten.copy_.default)[0]
    emit(write, aten.copy_.default, *write.args)
    return 1


def move_a_read_across_a_write(gm, ctx):
    find_calls(gm, aten.copy_.default)[0].append(find_calls(gm, aten.sum.default)[0])
    return 1


def read_after_the_release(gm, ctx):
    (wait,) = (wait_of(started) for started in _gathers(gm)[1:])
    emit(find_calls(gm, aten.t.default)[1], inductor.resize_storage_bytes_.default, wait, 0)
    return 1


def read_a_view_after_its_base_was_emptied(gm, ctx):
    wait = wait_of(_gathers(gm)[0])
    view = emit(wait.next, aten.view.default, wait, [4, 4])
    view.meta["recompute"] = wait.meta["recompute"]
    use = find_calls(gm, aten.mm.default)[0]
    use.replace_input_with(wait, view)
    emit(use, aten.set_.default, wait)
    return 1


def move_a_collective_across_a_barrier(gm, ctx):
    write = find_calls(gm, aten.copy_.default)[0]
    wait = wait_of(_reductions(gm)[-1])
    write.append(wait)
    for user in list(wait.users):
        wait.append(user)
    return 1
