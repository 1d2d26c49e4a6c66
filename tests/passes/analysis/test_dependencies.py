from __future__ import annotations

import torch

from dsgraph.passes.analysis.dependencies import computed_from, dependencies, readers
from dsgraph.passes.ir.graph import is_view, placeholders
from tests.passes.tracing import trace


def _graph():
    def function(x, w):
        h = torch.mm(x, w.t())
        return h.sin(), w.t().t() * 2, x.cos()

    gm = trace(function, torch.randn(4, 4), torch.randn(4, 4))
    return gm, {node.name: node for node in gm.graph.nodes}


def _names(nodes):
    return sorted(node.name for node in nodes if node.op != "output")


def test_what_is_computed_from_an_input():
    gm, _ = _graph()
    x, w = placeholders(gm)
    graph = dependencies(gm)
    assert _names(computed_from(graph, [x])) == ["cos", "mm", "sin", "x_1"]
    assert _names(computed_from(graph, [w])) == ["mm", "mul", "sin", "t", "t_1", "t_2", "w_1"]
    assert computed_from(graph, []) == set()


def test_readers_are_found_through_views_and_no_further():
    gm, nodes = _graph()
    graph = dependencies(gm)
    assert _names(readers(graph, nodes["w_1"], through=is_view)) == ["mm", "mul", "t", "t_1", "t_2"]
    assert _names(readers(graph, nodes["w_1"], through=lambda _: False)) == ["t", "t_1"]
    assert _names(readers(graph, nodes["mm"], through=is_view)) == ["sin"]
