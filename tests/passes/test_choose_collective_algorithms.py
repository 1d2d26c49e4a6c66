from __future__ import annotations

import pytest
import torch
from torch.testing import FileCheck

from dsgraph.passes import ChooseCollectiveAlgorithms, InsertZeroCollectives, PassError, Pipeline
from tests.passes import lockstep
from tests.passes.tracing import GLOO, SHARD, code, reduce, run_pass, trace

c10d = torch.ops._c10d_functional


def _lowered(*inputs, rows=2, axis=GLOO):
    gm = trace(lambda a: (reduce(a * 2, (rows, 3)),), *inputs)
    run_pass(InsertZeroCollectives(), gm, axis)
    return gm


def test_gloo_exchanges_rows_and_adds_them_up():
    gm = _lowered(torch.randn(4, 3))
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 1
    FileCheck().check("all_to_all_single.default(mul, [2, 2], [2, 2], '0')").check_next("wait_tensor").check_next(
        "view.default("
    ).check_same("[2, 2, 3]").check_next("sum.dim_IntList(").check_same("[0])").check_next("div.Tensor").run(code(gm))
    FileCheck().check_not("reduce_scatter").run(code(gm))


@pytest.mark.parametrize("rows", [(2, 2), (3, 2), (1, 0)])
def test_meaning_is_kept_bit_for_bit(rows):
    torch.manual_seed(0)
    inputs = [[torch.randn(sum(rows), 3)] for _ in rows]
    graphs = [_lowered(*given, rows=own) for given, own in zip(inputs, rows, strict=True)]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(ChooseCollectiveAlgorithms(), gm, GLOO)
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


def test_a_second_run_changes_nothing():
    gm = _lowered(torch.randn(4, 3))
    run_pass(ChooseCollectiveAlgorithms(), gm, GLOO)
    before = code(gm)
    assert run_pass(ChooseCollectiveAlgorithms(), gm, GLOO).changed == 0
    assert code(gm) == before


def test_it_needs_the_collectives():
    with pytest.raises(PassError, match=r"requires 'zero-collectives'.*move choose_collective_algorithms after"):
        Pipeline([ChooseCollectiveAlgorithms(), InsertZeroCollectives()])
