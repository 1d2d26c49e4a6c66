from __future__ import annotations

import pytest
import torch
from torch.testing import FileCheck

from dsgraph.passes import PassError, Pipeline
from dsgraph.passes.zero.bucket_small_reductions import BucketSmallReductions
from dsgraph.passes.zero.insert_zero_collectives import InsertZeroCollectives
from tests.passes import lockstep
from tests.passes.tracing import code, reduce, run_pass, trace

WHOLE = {"group": "", "outer_groups": ["0"]}


def _three(a, b, c):
    first = reduce(a * 2, (8,), **WHOLE)
    second = reduce(b + 1, (2, 2), **WHOLE)
    third = reduce(c.sin(), (), **WHOLE)
    return first, second.view(4), third


def _inputs():
    return torch.randn(8), torch.randn(2, 2), torch.randn(())


def test_small_gradients_share_one_reduction():
    gm = trace(_three, *_inputs())
    assert run_pass(BucketSmallReductions(), gm).changed == 3
    assert code(gm).count("dsgraph.reduce_grad") == 1
    FileCheck().check_count("reshape.default(", 2, exactly=True).check("cat.default([").check(
        "reduce_grad.default(cat_default, [13]"
    ).check("split_with_sizes.default(").check_same("[8, 4, 1])").run(code(gm))


@pytest.mark.inductor
def test_inductor_lowers_what_it_writes():
    """Ops with a decomposition and no lowering are refused in graphs that passes have changed."""
    from torch._inductor.lowering import lowerings

    gm = trace(_three, *_inputs())
    run_pass(BucketSmallReductions(), gm)
    written = {node.target for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert {op for op in written if op.namespace == "aten"} <= lowerings.keys()


def test_meaning_is_kept_bit_for_bit():
    torch.manual_seed(0)
    inputs = [_inputs(), _inputs()]
    graphs = [trace(_three, *given) for given in inputs]
    expected = lockstep.run(graphs, inputs)
    for gm in graphs:
        run_pass(BucketSmallReductions(), gm)
        run_pass(InsertZeroCollectives(), gm)
    for before, after in zip(expected, lockstep.run(graphs, inputs), strict=True):
        for a, b in zip(before, after, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda a, b: (reduce(a, (4,)), reduce(b, (4,))), id="sharded"),
        pytest.param(lambda a, b: (reduce(a, (8,), **WHOLE), b), id="without a partner"),
        pytest.param(
            lambda a, b: (reduce(a, (8,), **WHOLE), reduce(b, (8,), **(WHOLE | {"reduce_dtype": torch.float64}))),
            id="different dtypes",
        ),
        pytest.param(
            lambda a, b: (reduce(a, (8,), **WHOLE), reduce(b, (8,), **(WHOLE | {"outer_groups": ["1", "0"]}))),
            id="different groups",
        ),
        pytest.param(lambda a, b: (reduce(reduce(a, (8,), **WHOLE) + b, (8,), **WHOLE),), id="the graph goes on"),
    ],
)
def test_left_alone(function):
    gm = trace(function, torch.randn(8), torch.randn(8))
    before = code(gm)
    assert run_pass(BucketSmallReductions(), gm).changed == 0
    assert code(gm) == before


def test_large_gradients_go_alone():
    gm = trace(_three, *_inputs())
    before = code(gm)
    result = run_pass(BucketSmallReductions(small_bytes=8), gm)
    assert result.changed == 0
    assert code(gm) == before
    assert [note.partition(":")[2] for note in result.notes] == [
        " its 32 bytes are more than small_bytes=8",
        " its 16 bytes are more than small_bytes=8",
        " no other small gradient has its groups and dtypes and fits into its bucket",
    ]


def test_a_gradient_that_the_graph_computes_with_is_noted():
    gm = trace(lambda a, b: (reduce(reduce(a, (8,), **WHOLE) + b, (8,), **WHOLE),), torch.randn(8), torch.randn(8))
    first, second = run_pass(BucketSmallReductions(), gm).notes
    assert first.endswith("is reduced separately: the graph computes with its result")
    assert first.startswith("reduce_grad [8] float32") and "no other small gradient" in second


def test_no_bucket_exceeds_its_cap():
    gm = trace(_three, *_inputs())
    assert run_pass(BucketSmallReductions(bucket_bytes=32), gm).changed == 2
    FileCheck().check("reduce_grad.default(").check_same("[8]").check("cat").check("reduce_grad.default(").check_same(
        "[5]"
    ).run(code(gm))


def test_a_second_run_changes_nothing():
    gm = trace(_three, *_inputs())
    run_pass(BucketSmallReductions(), gm)
    before = code(gm)
    assert run_pass(BucketSmallReductions(), gm).changed == 0
    assert code(gm) == before


def test_it_must_run_before_the_lowering():
    with pytest.raises(PassError, match="bucket_small_reductions must run before insert_zero_collectives"):
        Pipeline([InsertZeroCollectives(), BucketSmallReductions()])
