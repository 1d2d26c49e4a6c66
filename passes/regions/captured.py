"""Regions that Dynamo captured: one function of plain computation, which the outer graph calls for each block.

captured      y = region(x, p)                     region: x, p -> x @ gather_param(p.to_local(), ...)
hoisted       w = gather_param(p.to_local(), ...); y = region(x, w)             region: x, w -> x @ w
differentiated by AOTAutograd, which splits the body by itself:
y, s, v = forward(x, w);  dx, dw = backward(s, v, dy)       forward: x, w -> x @ w, f(x), w.t()
read outside  y, s = forward(x, w);  v = w.t();  dx, dw = backward(s, v, dy)    forward: x, w -> x @ w, f(x)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.compat import OpOverload, invoke_subgraph
from dsgraph.passes.ir.graph import (
    aliased_arguments,
    all_graph_modules,
    is_gather_marker,
    mutates_arguments,
    placeholders,
    replace_and_erase,
)
from dsgraph.passes.ir.regions import name_called


@dataclass(frozen=True)
class Captured:
    """What became of the regions of a captured graph.

    Attributes:
        calls: Name of each region, and how often it is called.
        inlined: Why others are no regions any more.
    """

    calls: tuple[tuple[str, int], ...] = ()
    inlined: tuple[str, ...] = ()


def open_regions(gm: GraphModule, *, write_out: str = "") -> Captured:
    """Moves what is distributed out of regions: markers, and what they read, stand in the outer graph.

    A region whose markers cannot leave it is written out where it is called, with the reason; so is one that is called
    once.

    Args:
        gm: A captured graph.
        write_out: Why all are to be written out; empty if they are not.
    """
    found, inlined = [], []
    for module in list(all_graph_modules(gm)):
        if isinstance(module, GraphModule) and module is not gm and any(_calls(module)):
            for name, sites in _calls_by_name(module).items():
                inlined.append(f"region {name} is written out: it is called inside another region or a checkpoint")
                _inline(module, name, sites)
    for name, sites in _calls_by_name(gm).items():
        body = getattr(gm, name)
        if write_out:
            _inline(gm, name, sites)
            inlined.append(f"regions are written out: {write_out}")
            continue
        _hoist(gm, body, sites)
        left = next((node for node in body.graph.nodes if is_gather_marker(node) or node.target == "to_local"), None)
        if len(sites) == 1:
            _inline(gm, name, sites)
        elif left is None:
            found.append((name, len(sites)))
        else:
            inlined.append(f"region {name} is written out: {left.name} depends on what it computes")
            _inline(gm, name, sites)
    if found or inlined:
        gm.graph.lint()
        gm.recompile()
    return Captured(tuple(found), tuple(dict.fromkeys(inlined)))


def _calls(gm: GraphModule) -> Iterator[Node]:
    yield from gm.graph.find_nodes(op="call_function", target=invoke_subgraph)


def _calls_by_name(gm: GraphModule) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in _calls(gm):
        found.setdefault(name_called(node), []).append(node)
    return found


def _hoist(gm: GraphModule, body: GraphModule, sites: list[Node]) -> None:
    inputs = placeholders(body)
    leaving = dict[Node, None]()
    for node in body.graph.nodes:
        is_read = node.op == "call_method" and node.target == "to_local"
        sources = node.all_input_nodes
        if (is_read or is_gather_marker(node)) and all(s in leaving or s.op == "placeholder" for s in sources):
            leaving[node] = None
    if not leaving:
        return
    crossing = [node for node in leaving if any(user not in leaving for user in node.users)]
    kept = [node for node in inputs if any(user not in leaving for user in node.users)]
    for site in sites:
        given: dict[Node, Any] = dict(zip(inputs, site.args[2:], strict=True))
        with gm.graph.inserting_before(site):
            for node in leaving:
                given[node] = gm.graph.node_copy(node, given.__getitem__)
                if "nn_module_stack" in site.meta:
                    given[node].meta["nn_module_stack"] = site.meta["nn_module_stack"]
        site.args = (*site.args[:2], *(given[node] for node in (*kept, *crossing)))
    last = inputs[-1]
    for node in crossing:
        with body.graph.inserting_after(last):
            last = body.graph.placeholder(f"{node.name}_full")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
    for node in reversed(leaving):
        body.graph.erase_node(node)
    for node in set(inputs).difference(kept):
        body.graph.erase_node(node)
    body.recompile()


def _inline(gm: GraphModule, name: str, sites: list[Node]) -> None:
    body = getattr(gm, name)
    for site in sites:
        copies: dict[Node, Any] = dict(zip(placeholders(body), site.args[2:], strict=True))
        with gm.graph.inserting_before(site):
            for node in body.graph.nodes:
                if node.op == "output":
                    results = [copies[item] if isinstance(item, Node) else item for item in node.args[0]]
                elif node.op != "placeholder":
                    copies[node] = gm.graph.node_copy(node, copies.__getitem__)
                    _set_module(copies[node], of=sites[0], to=site)
        for item in list(site.users):
            at: Any = item.args[1]
            replace_and_erase(item, results[at])
        callee: Any = site.args[0]
        gm.graph.erase_node(site)
        if not callee.users:
            gm.graph.erase_node(callee)
    gm.recompile()


def _set_module(node: Node, *, of: Node, to: Node) -> None:
    """Lets a node of a region, which was captured at one call, say that it stands in the module of another one."""
    stacks = [call.meta.get("nn_module_stack") or {} for call in (of, to)]
    if not all(stacks):
        return
    old, new = (str(stack[next(reversed(stack))][0]) for stack in stacks)
    own = node.meta.get("nn_module_stack") or {}
    node.meta["nn_module_stack"] = {
        key: (new + path.removeprefix(old) if path.startswith(old) else path, *rest)
        for key, (path, *rest) in own.items()
    }


def read_arguments_outside(gm: GraphModule) -> int:
    """Lets the backward take a region's arguments and views of them from the outer graph, not from the region.

    So passes see what is saved: a gathered parameter is gathered again, and Inductor, which takes what a region returns
    for memory of its own, frees nothing that others read.

    Args:
        gm: A joint graph whose regions are split.

    Returns:
        How many results of calls were replaced.
    """
    changed = 0
    for name, sites in _calls_by_name(gm).items():
        body = getattr(gm, name)
        views = _views_of_inputs(body)
        (output,) = body.graph.find_nodes(op="output")
        results = list(output.args[0])
        stay = [at for at, node in enumerate(results) if node not in views]
        for number in stay:
            results[number] = _alone(results[number], results[:number], before=output)
        for site in sites:
            known: dict[Node, Any] = dict(zip(placeholders(body), site.args[2:], strict=True))
            for item in list(site.users):
                at: Any = item.args[1]
                if results[at] in views:
                    with gm.graph.inserting_before(item):
                        view = _copied(results[at], known, of=sites[0], to=site)
                    replace_and_erase(item, view)
                    changed += 1
                else:
                    item.args = (site, stay.index(at))
            if isinstance(site.meta.get("val"), (tuple, list)):
                site.meta["val"] = tuple(site.meta["val"][at] for at in stay)
        output.args = (tuple(results[at] for at in stay),)
        body.graph.eliminate_dead_code()
        body.recompile()
    if changed:
        gm.recompile()
    return changed


def _views_of_inputs(body: GraphModule) -> set[Node]:
    """The inputs of a region, and what lies in their memory."""
    views = set(placeholders(body))
    for node in body.graph.nodes:
        is_view = isinstance(node.target, OpOverload) and not mutates_arguments(node)
        if is_view and views.issuperset(node.all_input_nodes) and None not in aliased_arguments(node):
            views.add(node)
    return views


def _alone(result: Node, earlier: list[Node], *, before: Node) -> Node:
    """A result, or a copy of it where an earlier one lies in the same memory: Inductor writes over what it frees."""
    if not isinstance(result, Node) or _memory_of(result) not in [_memory_of(node) for node in earlier]:
        return result
    with result.graph.inserting_before(before):
        copy = result.graph.call_function(torch.ops.aten.clone.default, (result,))
    copy.meta = {**result.meta, "val": torch.ops.aten.clone.default(result.meta["val"])}
    return copy


def _memory_of(node: Node) -> Node | None:
    """The node that made the memory in which a node's result lies."""
    while isinstance(node, Node) and node.op == "call_function":
        source = aliased_arguments(node)[0] if node.target is not operator.getitem else _origin(node)
        if source is None:
            break
        node = source
    return node


def _origin(item: Node) -> Node | None:
    """Of a result of a call with several ones, the argument in whose memory it lies."""
    call, at = item.args
    if not isinstance(call, Node) or call.op != "call_function" or not isinstance(at, int):
        return None
    sources = aliased_arguments(call)
    return sources[at] if at < len(sources) else None


def _copied(node: Node, known: dict[Node, Any], *, of: Node, to: Node) -> Any:
    """A view of a region's arguments, made again at the call `to`; `of` is the call at which it was captured."""
    if node not in known:
        for source in node.all_input_nodes:
            _copied(source, known, of=of, to=to)
        known[node] = to.graph.node_copy(node, known.__getitem__)
        _set_module(known[node], of=of, to=to)
    return known[node]
