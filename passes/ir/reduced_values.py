"""Reductions, and the nodes computed from their results."""

from __future__ import annotations

from torch.fx import Node

from .coalesced import inputs_of, results_of, waits_of
from .collectives import is_collective
from .gathers import has_units, is_unit
from .graph import is_barrier
from .transfers import is_stored_gradient


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
