"""Gathers and reductions, and the units that read or compute their values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from dsgraph.inductor_ext.units import RUN_BACKWARD, RUN_FORWARD

from .coalesced import inputs_of, results_of, waits_of
from .collectives import TABLE, Role, collective_group, collectives, is_collective
from .graph import is_barrier, is_view
from .parameters import MeshAxis
from .transfers import is_stored_gradient

aten = torch.ops.aten

Gather = tuple[Node, list[Node]]
"""The node that starts a gather, and the nodes that compute its arguments, in program order."""

# Ops that may be between a shard and its gather, besides views.
PREPARATIONS = (aten._to_copy.default, aten.constant_pad_nd.default, torch.ops.prims.convert_element_type.default)


def gathered_parameters(gm: GraphModule, axes: Sequence[MeshAxis]) -> list[Gather]:
    """Return each gather that can start at any time, with the nodes that compute its arguments, in program order."""
    found = []
    for started in collectives(gm):
        if started.target not in kinds_in(axes, collective_group(started)):
            continue
        chains = [_preparations(source) for result in results_of(started) for source in inputs_of(result)]
        if all(chain is not None for chain in chains):
            found.append((started, sorted({node for chain in chains for node in chain or ()})))
    return found


def kinds_in(axes: Sequence[MeshAxis], group: str) -> tuple[object, ...]:
    """Return the kinds of gathers of a group of which several may run at once."""
    backends = {axis.backend for axis in axes if axis.group == group}
    if not backends:
        return ()  # a user's own group
    gathers = [one for one in TABLE.entries if one.role is Role.GATHER and backends.isdisjoint(one.alone_on)]
    return tuple(op for one in gathers for op in one.built)


def _preparations(source: Node) -> list[Node] | None:
    """Return the nodes between an input of the graph and its gather; None if they are more than a cast or padding."""
    found = []
    while source.op == "call_function" and (is_view(source) or source.target in PREPARATIONS):
        found.append(source)
        source = source.all_input_nodes[0]
    return found if source.op == "placeholder" else None


def is_unit(node: Node) -> bool:
    """Return True for a node that stands for the run of a unit."""
    return node.target in (RUN_FORWARD, RUN_BACKWARD)


def has_units(graph: Graph) -> bool:
    """Return True for the graph of a step."""
    return any(graph.find_nodes(op="call_function", target=target) for target in (RUN_FORWARD, RUN_BACKWARD))


def reading_unit(started: Node) -> Node | None:
    """Return the first unit that reads the result of a gather; None in other graphs."""
    found, seen, frontier = list[Node](), set[Node](), results_of(started) if has_units(started.graph) else []
    while frontier:
        for user in frontier.pop().users:
            if is_unit(user):
                found.append(user)
            elif user not in seen:
                seen.add(user)
                frontier.append(user)
    return min(found, default=None)


def made_of(started: Node) -> list[Node] | str:
    """Return the waits and all nodes computed from them, in program order.

    Or the reason why these must stay in place.
    """
    waits = waits_of(started)
    found, frontier = set(waits), list(waits)
    while frontier:
        for user in frontier.pop().users:
            if user.op == "output" or user in found:
                continue
            if is_collective(user):
                return f"{user.name} communicates what it reduces again"
            if is_barrier(user):
                return f"{user.name} may write to what it reduces, or is of a kind that nothing moves across"
            found.add(user)
            frontier.append(user)
    for node in sorted(found.difference(waits)):
        if is_stored_gradient(node):
            continue  # it takes an input besides, the place in the file
        if any(source not in found for source in node.all_input_nodes):
            return f"{node.name} computes with what it reduces and with other values"
    return sorted(found)


def computing_unit(started: Node) -> Node | None:
    """Return the last unit that computes what a reduction sends; None in other graphs."""
    found, seen, frontier = list[Node](), set[Node](), list[Node]()
    if has_units(started.graph):
        frontier = [source for result in results_of(started) for source in inputs_of(result)]
    while frontier:
        node = frontier.pop()
        if is_unit(node):
            found.append(node)
        elif node not in seen:
            seen.add(node)
            frontier += node.all_input_nodes
    return max(found, default=None)
