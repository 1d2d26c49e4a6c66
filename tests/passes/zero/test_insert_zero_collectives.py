from __future__ import annotations

import pytest
import torch
from torch.testing import FileCheck
from torch.utils.checkpoint import CheckpointPolicy

from dsgraph.passes import PassContext, PassError, Phase, Pipeline, Runner
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes import lockstep
from tests.passes.tracing import OUTER, SHARD, code, gather, reduce, run_pass, trace


def _forward_and_backward(shard, x, *, shape=(4, 3), **how):
    weight = gather(shard, shape, **how)
    y = x @ weight.t()
    return y, reduce(y.t() @ x, shard.shape, **how)


def _lower(rows=2, shape=(4, 3), axes=(SHARD,), **how):
    gm = trace(lambda s, x: _forward_and_backward(s, x, shape=shape, **how), torch.randn(rows, 3), torch.randn(5, 3))
    result = run_pass(InsertZeroCollectives(), gm, *axes)
    return gm, result


def test_stage_3_gathers_and_reduce_scatters():
    gm, result = _lower()
    assert result.changed == 2
    FileCheck().check("all_gather_into_tensor.default(s_1, 2, '0')").check_next("wait_tensor").check("mm").check(
        "reduce_scatter_tensor.default("
    ).check_same("'sum', 2, '0')").check_next("wait_tensor").check_next("aten.div.Tensor").check_same(", 2)").run(
        code(gm)
    )
    FileCheck().check_not("dsgraph").check_not("pad").check_not("slice").run(code(gm))


def test_uneven_rows_are_padded_and_cut():
    gm, _ = _lower(rows=3, shape=(5, 3))
    FileCheck().check("all_gather_into_tensor").check("slice.Tensor").check_same("0, 0, 5)").check(
        "constant_pad_nd.default("
    ).check_same("[0, 0, 0, 1])").check("reduce_scatter_tensor").run(code(gm))
    short, _ = _lower(rows=2, shape=(5, 3))  # the other rank pads its shard as well
    FileCheck().check("constant_pad_nd.default(s_1, [0, 0, 0, 1])").check("all_gather_into_tensor").check(
        "slice.Tensor"
    ).check("slice.Tensor").check_same("0, 0, 2)").run(code(short))


def test_stage_2_reads_the_copy():
    gm = trace(
        lambda s, r, x: (x @ gather(s, (4, 3), r).t(), reduce(gather(s, (4, 3), r) + 1, (2, 3))),
        torch.randn(2, 3),
        torch.randn(4, 3),
        torch.randn(3, 3),
    )
    run_pass(InsertZeroCollectives(), gm)
    FileCheck().check("t.default(r_1)").check("reduce_scatter_tensor").run(code(gm))
    FileCheck().check_not("all_gather").run(code(gm))


def test_whole_parameters_are_all_reduced_over_every_axis():
    gm, _ = _lower(rows=4, axes=(OUTER, SHARD), group="", outer_groups=["1", "0"])
    FileCheck().check("t.default(s_1)").check("all_reduce.default(").check_same("'1')").check(
        "all_reduce.default("
    ).check_same("'0')").check("div.Tensor").check_same(", 4)").run(code(gm))
    FileCheck().check_not("all_gather").check_not("reduce_scatter").run(code(gm))


def test_hybrid_sharding_reduces_over_the_copies_too():
    gm, _ = _lower(axes=(OUTER, SHARD), outer_groups=["1"])
    FileCheck().check("reduce_scatter_tensor").check("all_reduce").check_same("'1')").check("div.Tensor").check_same(
        ", 4)"
    ).run(code(gm))


def test_the_cast_comes_before_the_gather_and_reductions_have_their_own_dtype():
    def function(shard, x):
        weight = gather(shard, (4, 3), dtype=torch.bfloat16)
        return x @ weight.t(), reduce(weight, (2, 3), reduce_dtype=torch.float64)

    gm = trace(function, torch.randn(2, 3), torch.randn(5, 3, dtype=torch.bfloat16))
    run_pass(InsertZeroCollectives(), gm)
    FileCheck().check("convert_element_type.default(shard_1, torch.bfloat16)").check(
        "all_gather_into_tensor.default(convert_element_type"
    ).check("torch.float64)").check("reduce_scatter_tensor.default(convert_element_type").check("div.Tensor").check(
        "torch.float32)"
    ).run(code(gm))


def test_a_parameter_without_dimensions_is_whole():
    how = {"group": "", "outer_groups": ["0"]}
    gm = trace(lambda s, x: (gather(s, (), **how) * x, reduce(x.sum(), (), **how)), torch.randn(()), torch.randn(3))
    run_pass(InsertZeroCollectives(), gm)
    FileCheck().check("mul.Tensor(s_1, x_1)").check("all_reduce.default(").check("div.Tensor").run(code(gm))


def test_one_rank_needs_no_collective():
    alone = type(SHARD)("shard", 1, "0", "gloo")
    gm, _ = _lower(rows=4, axes=(alone,))
    FileCheck().check_not("c10d").check_not("div").run(code(gm))


def test_gathers_and_what_is_cheap_to_derive_are_recomputed():
    def function(shard, x):
        weight = gather(shard, (4, 3))
        return x @ (weight * 2).t(), x + 1

    gm = trace(function, torch.randn(2, 3), torch.randn(5, 3))
    run_pass(InsertZeroCollectives(), gm)
    tagged = {n.name for n in gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE}
    assert tagged == {"all_gather_into_tensor_default", "wait_tensor_default", "mul", "t"}, code(gm)


def test_equal_markers_share_a_gather():
    """Each use of a parameter reads the shard through a view of its own."""

    def function(shard, x):
        first, second = gather(shard.view_as(shard), (4, 3)), gather(shard.view_as(shard), (4, 3))
        other = gather(shard.view(3, 2), (6, 2))
        return x @ first.t(), x @ second.t() * 2, other.sum()

    gm = trace(function, torch.randn(2, 3), torch.randn(5, 3))
    assert run_pass(InsertZeroCollectives(), gm).changed == 3
    assert len(list(collectives(gm))) == 2


def test_gathered_parameters_that_the_graph_returns_are_separate_tensors():
    gm = trace(lambda s: (gather(s, (4, 3)), gather(s, (4, 3))), torch.randn(2, 3))
    run_pass(InsertZeroCollectives(), gm)
    assert len(list(collectives(gm))) == 2


FOUR = {"0": [[0, 1], [2, 3]], "1": [[0, 2], [1, 3]]}


@pytest.mark.parametrize(
    ("rows", "how"),
    [
        ((2, 2), {}),
        ((3, 2), {}),
        ((1, 0), {}),
        ((4, 4), {"group": "", "outer_groups": ["0"]}),
        ((2, 2, 2, 2), {"outer_groups": ["1"]}),
        ((3, 2, 3, 2), {"outer_groups": ["1"]}),
        ((4, 4, 4, 4), {"group": "", "outer_groups": ["1", "0"]}),
        ((2, 2), {"dtype": torch.bfloat16, "reduce_dtype": torch.float64}),
    ],
)
def test_meaning_is_kept_bit_for_bit(rows, how):
    torch.manual_seed(0)
    groups = FOUR if len(rows) == 4 else None
    full = sum(rows[:2]) if how.get("group") != "" else rows[0]
    compute = how.get("dtype", torch.float32)
    inputs = [[torch.randn(own, 3), torch.randn(5, 3, dtype=compute)] for own in rows]

    def function(shard, x):
        weight = gather(shard, (full, 3), **how)
        y = x @ weight.t()
        return y, reduce(y.t() @ x, shard.shape, **(how | {"dtype": torch.float32}))

    graphs = [trace(function, *given) for given in inputs]
    expected = lockstep.run(graphs, inputs, groups)
    for gm in graphs:
        run_pass(InsertZeroCollectives(), gm, OUTER, SHARD)
        assert "dsgraph" not in code(gm)
    for before, after in zip(expected, lockstep.run(graphs, inputs, groups), strict=True):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a, b)


def test_a_second_run_changes_nothing():
    gm, _ = _lower()
    before = code(gm)
    assert run_pass(InsertZeroCollectives(), gm).changed == 0
    assert code(gm) == before


def test_a_group_outside_the_mesh_is_named():
    gm = trace(lambda s: gather(s, (4, 3), group="7"), torch.randn(2, 3))
    with pytest.raises(PassError, match=r"insert_zero_collectives.*process group '7'.*shard='0'"):
        run_pass(InsertZeroCollectives(), gm)


def test_the_runner_rejects_it_twice():
    with pytest.raises(PassError, match="twice"):
        Pipeline([InsertZeroCollectives(), InsertZeroCollectives()])


def test_nothing_happens_without_markers():
    gm = trace(lambda x: (x * 2,), torch.randn(3))
    before = code(gm)
    Runner(Pipeline([InsertZeroCollectives()])).run(gm, PassContext(phase=Phase.JOINT))
    assert code(gm) == before


@pytest.mark.parametrize("groups", [{"group": "0"}, {"group": "", "outer_groups": ["0"]}], ids=["sharded", "whole"])
def test_a_gradient_of_other_strides_is_made_contiguous(groups):
    gm = trace(lambda x: (reduce(x.t(), (2, 3) if groups["group"] else (4, 3), **groups),), torch.randn(3, 4))
    run_pass(InsertZeroCollectives(), gm)
    (started,) = collectives(gm)
    assert started.args[0].meta["val"].is_contiguous()
    assert started.args[0].target is torch.ops.aten.clone.default
