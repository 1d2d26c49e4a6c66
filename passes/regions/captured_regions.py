"""Regions that Dynamo captured: one function of plain computation, which the outer graph calls for each block.

captured      y = region(x, p)                     region: x, p -> x @ gather_param(p.to_local(), ...)
hoisted       w = gather_param(p.to_local(), ...); y = region(x, w)             region: x, w -> x @ w
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from dsgraph.passes.ir.graph import all_graph_modules, is_gather_marker, placeholders, replace_and_erase
from dsgraph.passes.ir.regions import calls_by_name, region_calls, set_module


@dataclass(frozen=True)
class CapturedRegions:
    """The regions of a captured graph after processing.

    Attributes:
        calls: Name of each region, and its number of calls.
        inlined: Why other regions were inlined.
    """

    calls: tuple[tuple[str, int], ...] = ()
    inlined: tuple[str, ...] = ()


def open_regions(gm: GraphModule, *, write_out: str = "") -> CapturedRegions:
    """Move distributed ops out of regions: markers and their inputs go to the outer graph.

    A region whose markers cannot leave it is inlined, with the reason; so is one that is called once.

    Args:
        gm: A captured graph.
        write_out: Why all regions are inlined; empty if they are not.
    """
    found, inlined = [], _drop_uncalled(gm)
    for module in list(all_graph_modules(gm)):
        if isinstance(module, GraphModule) and module is not gm and any(region_calls(module)):
            for name, sites in calls_by_name(module).items():
                inlined.append(f"region {name} is written out: it is called inside another region or a checkpoint")
                _inline(module, name, sites)
    for name, sites in calls_by_name(gm).items():
        body = getattr(gm, name)
        if write_out:
            _inline(gm, name, sites)
            inlined.append(f"regions are written out: {write_out}")
            continue
        _hoist(gm, body, sites)
        reason = "it is called once" if len(sites) == 1 else _why_not(body)
        if reason:
            inlined.append(f"region {name} is written out: {reason}")
            _inline(gm, name, sites)
        else:
            found.append((name, len(sites)))
    if found or inlined:
        gm.graph.lint()
        gm.recompile()
    return CapturedRegions(tuple(found), tuple(dict.fromkeys(inlined)))


def _drop_uncalled(gm: GraphModule) -> list[str]:
    """Drop bodies of regions that Dynamo has inlined because they are called once."""
    named = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    left = [name for name, module in gm.named_children() if isinstance(module, GraphModule) and name not in named]
    for name in left:
        gm.delete_submodule(name)
    return [f"region {name} is written out: it is called once" for name in left]


def _why_not(body: GraphModule) -> str:
    """Return why a region cannot be called: a marker did not leave it. Empty if all did."""
    for module in all_graph_modules(body):
        for node in module.graph.nodes:
            if is_gather_marker(node) or (node.op == "call_method" and node.target == "to_local"):
                inside = "depends on what it computes" if module is body else "stands in a checkpoint inside it"
                return f"{node.name} {inside}"
    return ""


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
                elif node.op == "get_attr":
                    copies[node] = gm.graph.get_attr(_taken_over(gm, name, attribute=str(node.target)))
                elif node.op != "placeholder":
                    copies[node] = gm.graph.node_copy(node, copies.__getitem__)
                    set_module(copies[node], of=sites[0], to=site)
        for item in list(site.users):
            at: Any = item.args[1]
            replace_and_erase(item, results[at])
        callee: Any = site.args[0]
        gm.graph.erase_node(site)
        if not callee.users:
            gm.graph.erase_node(callee)
    for other, module in list(gm.named_children()):
        if module is body:
            gm.delete_submodule(other)
    gm.recompile()


def _taken_over(gm: GraphModule, name: str, *, attribute: str) -> str:
    """Return the name under which a graph holds the attribute `attribute` of its region `name`."""
    own = f"{name}_{attribute.replace('.', '_')}"
    if not hasattr(gm, own):
        setattr(gm, own, operator.attrgetter(attribute)(getattr(gm, name)))
    return own
