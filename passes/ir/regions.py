"""Calls of regions: functions that a graph calls once for each of several equal blocks."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from dsgraph.passes.compat import invoke_subgraph


def is_region_call(node: Node) -> bool:
    """Whether a node calls a region."""
    return node.op == "call_function" and node.target is invoke_subgraph


def name_called(call: Node) -> str:
    """The name of the region that a node calls."""
    callee: Any = call.args[0]
    return str(callee.target)


def body_called(call: Node) -> GraphModule | None:
    """The region that a node calls; None where the graph stands in no module that holds it."""
    body = getattr(call.graph.owning_module, name_called(call), None)
    return body if isinstance(body, GraphModule) else None
