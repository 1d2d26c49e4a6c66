"""Fake values of calls that a pass adds to a captured graph, or changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg


def evaluate(node: Node) -> Any:
    """Return the fake result of a call, from the `example_value`s of its operands."""
    args, kwargs = map_arg((node.args, node.kwargs), _example_of)
    # The mode of the values themselves: while a backend runs, torch's context has another mode.
    mode = next(value.fake_mode for value in _values_of(node) if hasattr(value, "fake_mode"))
    old = node.meta.get("example_value")
    with mode, torch.set_grad_enabled(not isinstance(old, Tensor) or old.requires_grad):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _example_of(operand: Node) -> Any:
    is_body = operand.op == "get_attr" and "example_value" not in operand.meta
    return getattr(operand.graph.owning_module, str(operand.target)) if is_body else operand.meta["example_value"]


def _values_of(node: Node) -> Any:
    return (each.meta["example_value"] for each in node.graph.nodes if "example_value" in each.meta)
