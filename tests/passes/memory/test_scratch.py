"""Graphs that are made to be planned on."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.memory.scratch import copy_graph, merge_equal_nodes, on_scratch, runnable, without_duplicates
from tests.passes.tracing import trace

sin = torch.ops.aten.sin.default


def _twice() -> GraphModule:
    return trace(lambda x: x.sin() * x.sin().exp(), torch.randn(3))


def test_a_copy_is_no_code_until_it_runs_and_computes_the_same():
    gm, x = _twice(), torch.randn(3)
    with on_scratch():
        copied = copy_graph(gm)
    assert copied.graph is not gm.graph
    assert type(copied).__bases__ != (GraphModule,)
    found = runnable(copied)
    assert type(found).__bases__ == (GraphModule,) and runnable(found) is found
    assert torch.equal(found(x), gm(x)) and torch.equal(copied(x), gm(x))


def test_what_is_computed_twice_is_computed_where_it_was_first():
    gm, x = _twice(), torch.randn(3)
    first, _ = find_calls(gm, sin)
    merged = without_duplicates(gm)
    assert [node.name for node in find_calls(merged, sin)] == [first.name]
    assert len(find_calls(gm, sin)) == 2, "the graph itself stays as it is"
    assert torch.equal(merged(x), gm(x))


def _write_between(x):
    first = x.sin()
    x.view(3).add_(1)
    return first + x.sin()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sin() * x.sin().exp(), x.sin().view(3, 1)),
        lambda x: torch.rand_like(x) + torch.rand_like(x) + x.add(1) + x.add(1.0),
        lambda x: (
            (x * 2).sum() + (x * 2).view(3, 1).sum() + torch.empty_like(x).fill_(0).sum() + x.new_empty(3).size(0)
        ),
        lambda x: torch.stack([x, x]).unbind()[0] + torch.stack([x, x]).unbind()[1] + x.nonzero().sum(),
        _write_between,
    ],
)
def test_the_same_nodes_are_merged_as_by_torch(function):
    gm = make_fx(function, tracing_mode="fake")(torch.randn(3))
    theirs = GraphModule(gm, fx_graph_cse(gm.graph))
    ours = GraphModule(gm, merge_equal_nodes(gm.graph))
    assert ours.code == theirs.code
    assert len(ours.graph.nodes) <= len(gm.graph.nodes)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_it_was(enabled):
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="anything"), on_scratch():
            assert not gc.isenabled()
            raise ValueError("anything")
        assert gc.isenabled() is enabled
        assert not gc.get_freeze_count()
        gc.freeze()  # as others do
        with on_scratch():
            pass
        assert gc.get_freeze_count()
    finally:
        if not was_frozen:
            gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()
