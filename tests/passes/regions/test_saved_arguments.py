"""Arguments that a region returns are read from the outer graph. No result changes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from dsgraph.passes.compat import invoke_subgraph
from dsgraph.passes.ir.graph import placeholders
from dsgraph.passes.regions.saved_arguments import read_arguments_outside
from tests.passes.regions.calling import Calling
from tests.passes.tracing import code, trace


def _two_calls(function: Callable[..., Any], *, names: tuple[str, str] = ("block", "block")) -> GraphModule:
    """A graph that calls a region with `x, w` and with `y, w`, and returns all results."""
    body = trace(function, torch.randn(3, 3), torch.randn(3, 3))
    root, graph = nn.Module(), Graph()
    x, y, w = (graph.placeholder(name) for name in "xyw")
    results = []
    (output,) = body.graph.find_nodes(op="output")
    for name, given in zip(names, (x, y), strict=True):
        setattr(root, name, body)
        call = graph.call_function(invoke_subgraph, (graph.get_attr(name), name, given, w))
        results += [graph.call_function(operator.getitem, (call, at)) for at in range(len(output.args[0]))]
    graph.output(tuple(results))
    return GraphModule(root, graph)


def _read_outside(gm: GraphModule) -> int:
    inputs = [torch.randn(3, 3) for _ in placeholders(gm)]
    before = Calling(gm).run(*inputs)
    changed = read_arguments_outside(gm)
    gm.graph.lint()
    for ours, theirs in zip(Calling(gm).run(*inputs), before, strict=True):
        assert torch.equal(ours, theirs)
    return changed


def _results(gm: GraphModule) -> int:
    (output,) = gm.block.graph.find_nodes(op="output")
    return len(output.args[0])


@pytest.mark.parametrize(
    ("function", "outside", "left"),
    [
        (lambda x, w: (x @ w, w), 2, 1),
        (lambda x, w: (x @ w, w.t()), 2, 1),
        (lambda x, w: (x @ w, w.t().reshape(-1).reshape(9)), 0, 2),  # a copy: reshape of a transposed matrix
        (lambda x, w: (x @ w, x, w.t()[0]), 4, 1),
        (lambda x, w: (x @ w, x + 1), 0, 2),
    ],
)
def test_arguments_and_their_views_leave_a_region(function, outside, left):
    gm = _two_calls(function)
    assert _read_outside(gm) == outside
    assert _results(gm) == left


def test_a_body_under_two_names_is_changed_once():
    gm = _two_calls(lambda x, w: (x @ w, w.t()), names=("block", "again"))
    assert _read_outside(gm) == 2
    assert "self.again" not in code(gm) and _results(gm) == 1


def _saved_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    found = (x @ w).sigmoid()
    return found, found.t()


def test_results_in_one_memory_are_copied():
    gm = _two_calls(_saved_twice)
    assert _read_outside(gm) == 0
    results = gm.block(torch.randn(3, 3), torch.randn(3, 3))
    assert results[0].untyped_storage().data_ptr() != results[1].untyped_storage().data_ptr()
