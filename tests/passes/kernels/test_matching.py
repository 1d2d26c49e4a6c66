from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.passes.kernels.matching import call_of, writes


def calls_of(function: Callable[..., Any], *inputs: Tensor) -> list[Node]:
    """The calls of a function, in order, as Dynamo captures it."""
    seen: list[Node] = []

    def backend(gm: GraphModule, _: Sequence[Any]) -> GraphModule:
        seen.extend(node for node in gm.graph.nodes if node.op.startswith("call_"))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return seen


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.view(4, 3), "reshape"),
        (lambda x: x.view(torch.int32), None),  # the same bytes as other numbers
        (lambda x: x.view(torch.bfloat16), None),
        (lambda x: x.to(torch.float64), "cast"),
        (lambda x: x.to(torch.float32, True), "cast"),  # non_blocking
        (lambda x: x.to(torch.float32, False, True), None),  # a copy
        (lambda x: x.to("cpu", torch.float32, False, True), None),
        (lambda x: x.to(torch.float32, copy=True), None),
    ],
)
def test_what_changes_shape_or_dtype_alone(function, kind):
    call = call_of(calls_of(function, torch.randn(3, 4))[-1])
    assert (call.kind if call is not None else None) == kind


@pytest.mark.parametrize(
    "name", ["iadd", "ifloordiv", "imod", "ipow", "ixor", "ilshift", "irshift", "imatmul", "setitem"]
)
def test_operators_that_write(name):
    graph = torch.fx.Graph()
    assert writes(graph.call_function(getattr(operator, name), (graph.placeholder("x"), 1)))


@pytest.mark.parametrize(
    ("function", "is_write"),
    [
        (lambda x: x.relu_(), True),
        (lambda x: F.relu(x, True), True),
        (lambda x: F.relu(x), False),
        (lambda x: torch.relu(x), False),
        (lambda x: (x > 0) & (x < 1), False),  # `operator.and_`: named so because of the keyword
    ],
)
def test_calls_that_write(function, is_write):
    assert writes(calls_of(function, torch.randn(3))[-1]) == is_write
