"""Calls of regions (`torch.compiler.nested_compile_region`), replaced by the ops of their bodies.

before:  y = region(x, p); z = region(y, q)                    region: x, p -> x @ gather_param(p.to_local(), ...)
after:   w = gather_param(p.to_local(), ...); y = x @ w; v = gather_param(q.to_local(), ...); z = y @ v
"""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from torch.fx import GraphModule, Node

from dsgraph.passes.compat import invoke_subgraph

from .graph import placeholders, replace_and_erase


def inline_regions(gm: GraphModule) -> tuple[str, ...]:
    """Inline all calls of regions: in a captured graph, in regions, and in bodies of checkpoints.

    Args:
        gm: A captured graph.

    Returns:
        One note for each region.
    """
    notes = dict[str, None]()
    for module in _innermost_first(gm):
        names, first = list[str](), dict[GraphModule, Node]()
        for call in module.graph.find_nodes(op="call_function", target=invoke_subgraph):
            names.append(_name(call))
            _inline(module, call, captured_at=first.setdefault(getattr(module, names[-1]), call))
        names += _drop_uncalled(module)
        if names:
            module.graph.lint()
            module.recompile()
        notes.update((f"region {name} is written out: its calls are part of the graph", None) for name in names)
    return tuple(notes)


def _innermost_first(gm: GraphModule) -> dict[GraphModule, None]:
    """Return the graphs inside a graph, each after those inside it, and the graph itself."""
    inner = [_innermost_first(module) for module in gm.children() if isinstance(module, GraphModule)]
    return dict.fromkeys((*chain(*inner), gm))


def _name(call: Node) -> str:
    callee: Any = call.args[0]
    return str(callee.target)


def _inline(gm: GraphModule, call: Node, *, captured_at: Node) -> None:
    callee: Any = call.args[0]
    body = getattr(gm, _name(call))
    copies: dict[Node, Any] = dict(zip(placeholders(body), call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "get_attr":
                copies[node] = gm.graph.get_attr(_held(gm, _name(call), str(node.target)))
            elif node.op not in ("placeholder", "output"):
                copies[node] = gm.graph.node_copy(node, copies.__getitem__)
                _set_module(copies[node], of=captured_at, to=call)
    results: Any = body.graph.output_node().args[0]
    for item in list(call.users):
        at: Any = item.args[1]
        result = results[at]
        replace_and_erase(item, copies[result] if isinstance(result, Node) else result)
    gm.graph.erase_node(call)
    if not callee.users:
        gm.graph.erase_node(callee)


def _held(gm: GraphModule, name: str, attribute: str) -> str:
    """Return the name under which a graph holds the attribute `attribute` of its region `name`."""
    value, own = operator.attrgetter(attribute)(getattr(gm, name)), f"{name}_{attribute.replace('.', '_')}"
    while getattr(gm, own, value) is not value:
        own += "_"
    setattr(gm, own, value)
    return own


def _set_module(node: Node, *, of: Node, to: Node) -> None:
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


def _drop_uncalled(gm: GraphModule) -> list[str]:
    """Drop graphs that nothing calls: regions after inlining, also by Dynamo, which inlines one that is called once.

    Returns:
        Their names.
    """
    called = {str(node.target).split(".")[0] for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    held = [(name, module) for name, module in gm.named_modules(remove_duplicate=False) if name and "." not in name]
    left = [name for name, module in held if isinstance(module, GraphModule) and name not in called]
    for name in left:
        gm.delete_submodule(name)
    return left
