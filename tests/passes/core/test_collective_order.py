from __future__ import annotations

from types import MappingProxyType

import torch

from dsgraph.passes import ParameterSpec, PassContext, Phase, Pipeline, Runner, graph_pass
from dsgraph.passes.core.collective_order import collective_lines, describe_order
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.zero.choose_collective_algorithms import ChooseCollectiveAlgorithms
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes.tracing import GLOO, OUTER, SHARD, gather, reduce, run_pass, trace

AXES = ("shard", "replicate")


def _layer(x, a, b):
    y = torch.mm(x, gather(a, (4, 4)))
    return torch.mm(y, gather(b.bfloat16(), (4, 4)).float()), reduce(torch.mm(x, y), (2, 4))


def _lowered(axis=SHARD):
    gm = trace(_layer, torch.randn(4, 4), torch.randn(2, 4), torch.randn(2, 4))
    run_pass(InsertZeroCollectives(), gm, axis)
    run_pass(ChooseCollectiveAlgorithms(), gm, axis)
    return gm


def _context(axis=SHARD):
    info = {name: ParameterSpec(name, (4, 4), (2, 4), torch.float32, "0", True) for name in ("first", "second")}
    params = {"a_1": info["first"], "b_1": info["second"]}
    return PassContext(Phase.JOINT, (axis,), MappingProxyType(params), MappingProxyType({1: "first"}))


def test_lines_say_whose_each_collective_is():
    assert collective_lines(_lowered(), _context()) == [
        "_c10d_functional.all_gather_into_tensor.default [4, 4] torch.float32 over shard of first",
        "_c10d_functional.all_gather_into_tensor.default [4, 4] torch.float32 over shard of second",
        "_c10d_functional.reduce_scatter_tensor.default [2, 4] torch.float32 over shard for the gradient of first",
    ]
    assert collective_lines(_lowered(GLOO), _context(GLOO))[-1] == (
        "dsgraph.exchange_by_messages.default [4, 4] torch.float32 over shard for the gradient of first"
    )


def test_reductions_over_one_axis_after_the_other_are_for_the_same_gradient():
    how = {"outer_groups": ["1"]}
    gm = trace(lambda x: (reduce(x * 2, (2, 4), **how), reduce(x * 3, (2, 4), **how)), torch.randn(4, 4))
    run_pass(InsertZeroCollectives(), gm, GLOO, OUTER)
    run_pass(ChooseCollectiveAlgorithms(), gm, GLOO, OUTER)
    ctx = PassContext(Phase.JOINT, (GLOO, OUTER), gradients=MappingProxyType({0: "first", 1: "second"}))
    lines = [line.partition(" over ")[2] for line in collective_lines(gm, ctx)]
    assert lines == [f"{axis} for the gradient of {name}" for name in ("first", "second") for axis in AXES]


def test_what_is_nobodys_has_its_op_and_shape():
    lines = collective_lines(_lowered(), PassContext(Phase.JOINT))
    assert (
        lines[0] == "_c10d_functional.all_gather_into_tensor.default [4, 4] torch.float32 over another group, number 0"
    )


def test_two_gathers_of_one_shape_have_an_order():
    gm = _lowered()
    before = describe_order(gm, _context())
    first, second = collectives(gm)[:2]
    shard = second.all_input_nodes[0]
    first.prepend(shard)
    shard.append(second)
    assert before.startswith("3 collectives in the order ")
    assert describe_order(gm, _context()) != before


def test_the_runner_notes_the_order_after_each_pass_that_may_change_it():
    def nothing(gm, ctx):
        return 0

    def may_reorder(gm, ctx):
        return 0

    passes = [graph_pass(phase="joint")(nothing), graph_pass(phase="joint", reorders_collectives=True)(may_reorder)]
    gm = _lowered()
    runner = Runner(Pipeline(passes))
    runner.run(gm, _context())
    order = describe_order(gm, _context())
    assert runner.orders == [f"the joint graph as it came: {order}", f"the joint graph after pass may_reorder: {order}"]
    unverified = Runner(Pipeline(passes), verify=False)
    unverified.run(gm, _context())
    assert len(unverified.orders) == 3


def test_rows_that_a_rank_chooses_are_not_compared():
    def lines(splits, rows, width):
        def send(x):
            return torch.ops._c10d_functional.all_to_all_single(x * 2, [2, 2], splits, "0")

        return collective_lines(trace(send, torch.randn(rows, width)), _context())

    assert lines([1, 3], 4, 4) == lines([3, 2], 5, 4) != lines([1, 3], 4, 5)
