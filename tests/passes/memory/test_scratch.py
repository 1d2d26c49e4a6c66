"""Graphs that are made to be planned on."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.fx import GraphModule

from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.memory.scratch import copy_graph, on_scratch, runnable, without_duplicates
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
