"""Dependencies between the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    import networkx as nx


def dependencies(gm: GraphModule) -> nx.DiGraph[Node]:
    """Return a graph with an edge from each node to each of its readers."""
    import networkx as nx  # as torch does, when it is needed: it takes a third of a second

    graph: nx.DiGraph[Node] = nx.DiGraph()
    graph.add_nodes_from(gm.graph.nodes)
    graph.add_edges_from((source, node) for node in gm.graph.nodes for source in node.all_input_nodes)
    return graph


def computed_from(graph: nx.DiGraph[Node], sources: Iterable[Node]) -> set[Node]:
    """Return the sources, and all nodes that depend on one of them."""
    import networkx as nx

    found = set(sources)
    return found.union(*(nx.descendants(graph, source) for source in found))


def readers(graph: nx.DiGraph[Node], value: Node, *, through: Callable[[Node], bool]) -> set[Node]:
    """Return the nodes that read a value, directly or through a chain of nodes for which `through` is true."""
    import networkx as nx

    chains = nx.subgraph_view(graph, filter_node=lambda node: node is value or through(node))
    links = {value, *nx.descendants(chains, value)}
    return {user for link in links for user in graph.successors(link)}
