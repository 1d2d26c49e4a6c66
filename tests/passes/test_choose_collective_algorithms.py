from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import FileCheck
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes import ChooseCollectiveAlgorithms, InsertZeroCollectives, PassError, Pipeline
from dsgraph.passes.graph import collectives, fake_value
from tests.passes import lockstep
from tests.passes.tracing import GLOO, SHARD, code, gather, reduce, run_pass, trace

c10d = torch.ops._c10d_functional


def _lowered(*inputs, rows=2, axis=GLOO):
    gm = trace(lambda a: (reduce(a * 2, (rows, 3)),), *inputs)
    run_pass(InsertZeroCollectives(), gm, axis)
    return gm


def test_gloo_exchanges_rows_and_adds_them_up():
    gm = _lowered(torch.randn(4, 3))
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 1
    FileCheck().check("exchange_by_messages.default(mul, 2, '0')").check_next("wait_tensor").check_next(
        "view.default("
    ).check_same("[2, 2, 3]").check_next("sum.dim_IntList(").check_same("[0]").check_next("div.Tensor").run(code(gm))
    FileCheck().check_not("reduce_scatter").run(code(gm))


def _gathering(shard):
    gm = trace(lambda a: (gather(a, (5, 3)) * 2,), shard)
    run_pass(InsertZeroCollectives(), gm, GLOO)
    return gm


def test_gloo_gathers_by_messages_that_are_still_repeated_in_the_backward():
    gm = _gathering(torch.randn(3, 3))
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 1
    FileCheck().check("gather_by_messages.default(a_1, 2, '0')").check_next("wait_tensor").check_next(
        "slice.Tensor"
    ).run(code(gm))
    FileCheck().check_not("all_gather").run(code(gm))
    (started,) = collectives(gm)
    assert started.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE


def test_gathered_rows_are_the_same():
    inputs = [[torch.randn(3, 3)], [torch.randn(2, 3)]]
    graphs = [_gathering(*given) for given in inputs]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(ChooseCollectiveAlgorithms(), gm, GLOO)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert torch.equal(before[0], after[0])


@pytest.mark.parametrize("rows", [(2, 2), (3, 2), (1, 0), (2, 2, 2)])
def test_meaning_is_kept_bit_for_bit(rows):
    torch.manual_seed(0)
    axis = replace(GLOO, size=len(rows))  # with three ranks the order of the sum shows
    inputs = [[torch.randn(sum(rows), 3)] for _ in rows]
    graphs = [_lowered(*given, rows=own, axis=axis) for given, own in zip(inputs, rows, strict=True)]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(ChooseCollectiveAlgorithms(), gm, axis)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        assert torch.equal(before[0], after[0])


def test_other_backends_keep_their_own():
    gm = _lowered(torch.randn(4, 3), axis=SHARD)
    before = code(gm)
    assert run_pass(ChooseCollectiveAlgorithms(), gm, SHARD).changed == 0
    assert code(gm) == before


@pytest.mark.parametrize("how", [("max", "0"), ("sum", "a group of the user's")])
def test_other_reductions_and_groups_are_left_alone(how):
    op, group = how

    def function(a):
        return (c10d.wait_tensor(c10d.reduce_scatter_tensor(a, op, 2, group)),)

    gm = trace(function, torch.randn(4, 3))
    before = code(gm)
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 0
    assert code(gm) == before


def test_sums_of_integers_keep_their_dtype():
    gm = trace(
        lambda a: (c10d.wait_tensor(c10d.reduce_scatter_tensor(a, "sum", 2, "0")),),
        torch.ones(4, 3, dtype=torch.int32),
    )
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 1
    (output,) = gm.graph.find_nodes(op="output")
    assert fake_value(output.args[0][0]).dtype is torch.int32


def test_sizes_that_vary_are_left_alone():
    gm = make_fx(lambda a: (c10d.wait_tensor(c10d.reduce_scatter_tensor(a, "sum", 2, "0")),), tracing_mode="symbolic")(
        torch.randn(4, 3)
    )
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 0


def test_a_second_run_changes_nothing():
    gm = _lowered(torch.randn(4, 3))
    run_pass(ChooseCollectiveAlgorithms(), gm, GLOO)
    before = code(gm)
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 0
    assert code(gm) == before


def test_it_needs_the_collectives():
    with pytest.raises(PassError, match=r"requires 'zero-collectives'.*move choose_collective_algorithms after"):
        Pipeline([ChooseCollectiveAlgorithms(), InsertZeroCollectives()])
