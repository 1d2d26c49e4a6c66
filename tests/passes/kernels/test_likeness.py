from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from dsgraph.passes.kernels.likeness import Likeness, cast
from dsgraph.passes.kernels.matching import is_call
from tests.passes.kernels.test_matching import calls_of

GATE = Likeness.of(lambda gate, up: cast(torch.sigmoid(gate)) * up, anchor="sigmoid")


def _found(likeness: Likeness, function: Callable[..., Any], *inputs: Tensor) -> list[tuple[str, dict[str, str]]]:
    anchors = [node for node in calls_of(function, *inputs) if is_call(node, "sigmoid")]
    places = [found for node in anchors for found in likeness.find(node)]
    return [(item.end.name, {name: str(value) for name, value in item.arguments.items()}) for item in places]


@pytest.mark.parametrize(
    ("function", "ends"),
    [
        (lambda x, y: torch.sigmoid(x) * y, ["mul"]),
        (lambda x, y: y * x.sigmoid().double(), ["mul"]),
        (lambda x, y: (s := torch.sigmoid(x)) * y + s.double() * x, ["mul_1", "mul"]),  # the cast comes first
        (lambda x, y: torch.sigmoid(x) + y, []),
        (lambda x, y: torch.sigmoid(x).neg() * y, []),
    ],
)
def test_an_anchor_is_followed_to_the_end_of_the_function(function, ends):
    found = _found(GATE, function, torch.ones(3), torch.ones(3))
    assert [end for end, _ in found] == ends and all("x" in arguments["gate"] for _, arguments in found)


def test_the_anchor_is_the_node_that_was_asked_for():
    found = _found(GATE, lambda x, y: torch.sigmoid(x) * torch.sigmoid(y), torch.ones(3), torch.ones(3))
    assert [arguments["up"] for _, arguments in found] == ["sigmoid_1", "sigmoid"]


def test_every_order_is_tried_until_the_rest_fits():
    likeness = Likeness.of(lambda x, y, z: torch.sigmoid(x + y) - x * z, anchor="sigmoid")
    ((_, arguments),) = _found(likeness, lambda a, b: torch.sigmoid(a + b) - b * 2, torch.ones(3), torch.ones(3))
    assert "b" in arguments["x"] and "a" in arguments["y"] and arguments["z"] == "2"


def test_a_parameter_that_is_cast_twice_is_one():
    likeness = Likeness.of(lambda x: torch.sigmoid(x) * x, anchor="sigmoid")
    assert len(_found(likeness, lambda x: x.double().sigmoid() * x.double(), torch.ones(3))) == 1
    exact = Likeness.of(_swish)
    ends = calls_of(lambda x: x.double().sigmoid() * x.double(), torch.ones(3))
    assert [exact.match(node) for node in ends if exact.is_anchor(node)] == [None]


def _swish(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * x


def test_an_argument_of_another_kind_is_none():
    assert not list(GATE.find(None)) and not list(GATE.find(torch.fx.Graph().placeholder("x")))
    assert isinstance(GATE.path[0], Node)
