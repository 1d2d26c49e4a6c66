"""What of a graph depends on what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    import networkx as nx


def dependencies(gm: GraphModule) -> nx.DiGraph[Node]:
    """An arrow from each node to each that reads it."""
    import networkx as nx  # as torch does, when it is needed: it takes a third of a second

    graph: nx.DiGraph[Node] = nx.DiGraph()
    graph.add_nodes_from(gm.graph.nodes)
    graph.add_edges_from((source, node) for node in gm.graph.nodes for source in node.all_input_nodes)
    return graph


def computed_from(graph: nx.DiGraph[Node], sources: Iterable[Node]) -> set[Node]:
    """The sources, and all that depends on one of them."""
    import networkx as nx

    found = set(sources)
    return found.union(*(nx.descendants(graph, source) for source in found))


def readers(graph: nx.DiGraph[Node], value: Node, *, through: Callable[[Node], bool]) -> set[Node]:
    """The nodes that read a value, or what a chain of nodes that answer to `through` makes of it."""
    import networkx as nx

    chains = nx.subgraph_view(graph, filter_node=lambda node: node is value or through(node))
    links = {value, *nx.descendants(chains, value)}
    return {user for link in links for user in graph.successors(link)}
