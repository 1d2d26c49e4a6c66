"""Finds values of a captured forward that every rank can compute locally: masks, positions, rotary tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor
from torch.fx import Graph, Node

from dsgraph.passes.analysis.sizes import tensor_bytes

# Larger buffers are not copied to other ranks.
SMALL_BUFFER = 1 << 20


def root_values(graph: Graph, *, parameters: Collection[Node], impure: Collection[Node]) -> set[Node]:
    """Return the calls that read only inputs and small buffers, so that stages can repeat instead of receive them.

    Args:
        graph: A captured forward; each node's `meta["val"]` is its fake value.
        parameters: Placeholders of parameters, which not every rank has.
        impure: Nodes that draw random numbers, write, or are written to.
    """
    found: set[Node] = {
        node for node in graph.find_nodes(op="placeholder") if node not in parameters and node not in impure
    }
    roots = set(found)
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or node in impure or _mode(node) is not None:
            continue
        value = node.meta.get("val")
        has_gradient = isinstance(value, Tensor) and value.requires_grad
        if not has_gradient and all(operand in found for operand in node.all_input_nodes):
            found.add(node)
    spans = list(regions(graph))
    partial = [span for span in spans if not _is_whole(span, found)]
    while partial:  # a region is repeated together with its opening and closing nodes, or not at all
        found -= _readers([node for span in partial for node in span], found)
        partial = [span for span in spans if found.intersection(span) and not _is_whole(span, found)]
    return found - roots


def _is_whole(span: Sequence[Node], found: Collection[Node]) -> bool:
    return all(node in found or _mode(node) is not None for node in span)


def is_small(node: Node) -> bool:
    """Return True if a buffer may be copied to other ranks."""
    return tensor_bytes(node.meta.get("val")) <= SMALL_BUFFER


def regions(graph: Graph) -> Iterator[list[Node]]:
    """Yield regions of another mode, such as autocast, a level of `vmap`, no gradients.

    Yields:
        The nodes of each region in the graph's order, from the opening to the closing node.
    """
    open_ones: dict[str, list[list[Node]]] = {}
    for node in graph.nodes:
        kind, begins = _mode(node) or ("", False)
        if kind and begins:
            open_ones.setdefault(kind, []).append([])
        for spans in open_ones.values():
            for span in spans:
                span.append(node)
        if kind and not begins and open_ones.get(kind):
            yield open_ones[kind].pop()


def _mode(node: Node) -> tuple[str, bool] | None:
    """Return the mode that a node begins (True) or ends (False)."""
    name = str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""
    for begin, end in (("_enter_", "_exit_"), ("_increment_nesting", "_decrement_nesting")):
        for part, begins in ((begin, True), (end, False)):
            if part in name:
                return name.replace(part, ""), begins
    return ("no gradients", not node.args[0]) if name == "_set_grad_enabled" else None


def _readers(nodes: Collection[Node], among: Collection[Node]) -> set[Node]:
    """Return these nodes, and those among others that read them, directly or indirectly."""
    left, found = list(nodes), set[Node]()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(user for user in node.users if user in among)
    return found
