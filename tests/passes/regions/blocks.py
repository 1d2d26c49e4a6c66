"""Graphs of a few equal blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from tests.passes.tracing import trace


def trace_blocks(block: Callable[..., Tensor], inputs: list[Any], *, count: int = 3) -> GraphModule:
    """`block(x, number)` called `count` times, each time as a block of a list of modules, as Dynamo notes it."""
    gm = trace(lambda *values: (_chain(block, values, count),), *inputs)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    each, rest = divmod(len(nodes), count)
    assert rest == 0, "blocks that write the same number of nodes can be told apart here"
    for number, node in enumerate(nodes):
        node.meta["nn_module_stack"] = {"": (f"L['self'].net.blocks.{number // each}.inner", object)}
    return gm


def _chain(block: Callable[..., Tensor], values: tuple[Any, ...], count: int) -> Tensor:
    x = values[0]
    for number in range(count):
        x = block(x, number, *values[1:])
    return x
