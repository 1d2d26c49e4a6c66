from __future__ import annotations

import operator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from dsgraph.passes.kernels.add_call import add_call, with_gradient_as


def test_a_call_has_its_own_value_and_the_metadata_of_the_node():
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta = {"example_value": torch.empty(2, 3), "stack_trace": "model.py"}
    turned = add_call(x, "transpose", (x, 0, 1))
    total = add_call(x, torch.add, (turned, turned), {"alpha": 2})
    part = add_call(x, operator.getitem, (total, 0))
    assert [node.op for node in graph.nodes] == ["placeholder", "call_method", "call_function", "call_function"]
    assert [tuple(node.meta["example_value"].shape) for node in (turned, total, part)] == [(3, 2), (3, 2), (2,)]
    assert total.kwargs == {"alpha": 2} and part.meta["stack_trace"] == "model.py"


def test_a_value_needs_a_gradient_as_the_graphs_own():
    made = with_gradient_as(torch.ones(2, requires_grad=True), torch.zeros(2))
    assert made.requires_grad and not with_gradient_as(torch.ones(2), made).requires_grad
    assert with_gradient_as(3, made) is made
