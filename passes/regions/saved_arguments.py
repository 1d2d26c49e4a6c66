"""Saved arguments of regions, read from the outer graph instead.

AOTAutograd differentiates a region and splits its body separately; the backward gets everything from the region's
forward:

before:  y, s, v = forward(x, w);  dx, dw = backward(s, v, dy)               forward: x, w -> x @ w, f(x), w.t()
after:   y, s = forward(x, w);  v = w.t();  dx, dw = backward(s, v, dy)      forward: x, w -> x @ w, f(x)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.compat import OpOverload
from dsgraph.passes.ir.graph import aliased_arguments, mutates_arguments, placeholders, replace_and_erase
from dsgraph.passes.ir.regions import calls_by_name, set_module


def read_arguments_outside(gm: GraphModule) -> int:
    """Let the backward read a region's arguments and views of them from the outer graph, not from the region.

    So passes see the saved values: a gathered parameter is gathered again, and Inductor, which assumes that a region
    returns new memory, frees nothing that others read.

    Args:
        gm: A joint graph whose regions are split.

    Returns:
        The number of replaced results of calls.
    """
    changed = 0
    for name, sites in calls_by_name(gm).items():
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
    """Return the inputs of a region, and the nodes that share their memory."""
    views = set(placeholders(body))
    for node in body.graph.nodes:
        is_view = isinstance(node.target, OpOverload) and not mutates_arguments(node)
        if is_view and views.issuperset(node.all_input_nodes) and None not in aliased_arguments(node):
            views.add(node)
    return views


def _alone(result: Node, earlier: list[Node], *, before: Node) -> Node:
    """Return a result, or a copy if an earlier one shares its memory: Inductor overwrites memory that it frees."""
    if not isinstance(result, Node) or _memory_of(result) not in [_memory_of(node) for node in earlier]:
        return result
    with result.graph.inserting_before(before):
        copy = result.graph.call_function(torch.ops.aten.clone.default, (result,))
    copy.meta = {**result.meta, "val": torch.ops.aten.clone.default(result.meta["val"])}
    return copy


def _memory_of(node: Node) -> Node | None:
    """Return the node that allocated the memory of a node's result."""
    while isinstance(node, Node) and node.op == "call_function":
        source = aliased_arguments(node)[0] if node.target is not operator.getitem else _origin(node)
        if source is None:
            break
        node = source
    return node


def _origin(item: Node) -> Node | None:
    """Return the argument whose memory a result of a call with several results shares."""
    call, at = item.args
    if not isinstance(call, Node) or call.op != "call_function" or not isinstance(at, int):
        return None
    sources = aliased_arguments(call)
    return sources[at] if at < len(sources) else None


def _copied(node: Node, known: dict[Node, Any], *, of: Node, to: Node) -> Any:
    """Copy a view of a region's arguments to the call `to`; `of` is the call at which it was captured."""
    if node not in known:
        for source in node.all_input_nodes:
            _copied(source, known, of=of, to=to)
        known[node] = to.graph.node_copy(node, known.__getitem__)
        set_module(known[node], of=of, to=to)
    return known[node]
