"""Captured graphs of small functions, in which weights are marked as sliced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import dsgraph  # noqa: F401  # registers the ops
from dsgraph.passes.ir.graph import placeholders

RANKS, GROUP = 2, "tp"


def marked(own: Tensor, dim: int, parts: int = 1) -> Tensor:
    """The full tensor of which `own` is a slice."""
    return torch.ops.dsgraph.gather_slices(own, dim, parts, RANKS, GROUP)


def capture(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The graph that Dynamo captures, with fake values; nothing is run, so that no group is needed."""
    seen: list[GraphModule] = []

    def keep(gm: GraphModule, values: list[Any]) -> Callable[..., Any]:
        seen.append(gm)
        return lambda *args: [None] * len(gm.graph.output_node().args[0])  # type: ignore[arg-type]

    torch._dynamo.reset()
    torch.compile(function, backend=keep, dynamic=False)(*inputs)
    (gm,) = seen
    return gm


def named(gm: GraphModule, names: Mapping[int, str]) -> dict[Node, str]:
    """Placeholders by their number -> names."""
    return {node: names[number] for number, node in enumerate(placeholders(gm)) if number in names}
