"""Calls of regions: functions that a graph calls once for each of several equal blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from dsgraph.passes.compat import invoke_subgraph


def is_region_call(node: Node) -> bool:
    """Return whether a node calls a region."""
    return node.op == "call_function" and node.target is invoke_subgraph


def name_called(call: Node) -> str:
    """Return the name of the region that a node calls."""
    callee: Any = call.args[0]
    return str(callee.target)


def body_called(call: Node) -> GraphModule | None:
    """Return the region that a node calls; None if the graph is in no module that contains it."""
    body = getattr(call.graph.owning_module, name_called(call), None)
    return body if isinstance(body, GraphModule) else None


def region_calls(gm: GraphModule) -> Iterator[Node]:
    """Yield the calls of regions in a graph, in its order."""
    yield from gm.graph.find_nodes(op="call_function", target=invoke_subgraph)


def calls_by_name(gm: GraphModule) -> dict[str, list[Node]]:
    """Return the calls of each region of a graph. A region with several names keeps the first, also in the graph."""
    first: dict[int, str] = {}
    found: dict[str, list[Node]] = {}
    others = set[str]()
    for call in list(region_calls(gm)):
        own = name_called(call)
        name = first.setdefault(id(getattr(gm, own)), own)
        if name != own:
            callee: Any = call.args[0]
            callee.target = name
            others.add(own)
        found.setdefault(name, []).append(call)
    for other in others:
        gm.delete_submodule(other)
    return found


def set_module(node: Node, *, of: Node, to: Node) -> None:
    """Set the module of a region's node, which was captured at one call, to that of another call."""
    stacks = [call.meta.get("nn_module_stack") or {} for call in (of, to)]
    if not all(stacks):
        return
    old, new = (str(stack[next(reversed(stack))][0]) for stack in stacks)
    own = node.meta.get("nn_module_stack") or {}
    node.meta["nn_module_stack"] = {
        key: (new + path.removeprefix(old) if path.startswith(old) else path, *rest)
        for key, (path, *rest) in own.items()
    }
