"""`dsgraph dot`: a graph for other programs to draw."""

from __future__ import annotations

import argparse
from pathlib import Path

import networkx as nx

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.dumping.records import GraphRecord, NodeRecord
from dsgraph.tools.dumping.render import bytes_text, render_value

from .dumps import GRAPH_HELP, Dump, add_dump_argument, find_node

_FILL = {"placeholder": "#dddddd", "output": "#dddddd"}
_COLLECTIVE, _WAIT, _COMPUTE = "#f4b183", "#f8d9c0", "#cfe2f3"


def dot(args: argparse.Namespace) -> Answer:
    """Return a graph, or the neighbourhood of a node, as Graphviz or GraphML text."""
    if args.radius < 0:
        raise CommandError(f"--radius is {args.radius}; it takes 0 or more")
    graph = Dump(args.dir).graph(args.graph)
    network = _network(graph)
    if args.around is not None:
        centre = find_node(graph, args.around).name
        network = nx.ego_graph(network, centre, radius=args.radius, undirected=True)
    text = _graphviz(graph, network) if args.format == "dot" else "\n".join(nx.generate_graphml(network))
    data = {"format": args.format, "nodes": network.number_of_nodes(), "edges": network.number_of_edges()}
    if args.out is None:
        return Answer(text, {**data, "text": text})
    try:
        args.out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--out: {args.out} cannot be written: {error.strerror}") from None
    return Answer(f"{args.out}: {data['nodes']} nodes, {data['edges']} edges", {**data, "file": str(args.out)})


def _network(graph: GraphRecord) -> nx.DiGraph[str]:
    network: nx.DiGraph[str] = nx.DiGraph()
    for node in graph.nodes:
        facts = {
            "op": node.op,
            "target": node.target,
            "values": ", ".join(map(render_value, node.values)),
            "bytes": node.bytes,
            "module": node.module,
            "source": node.source,
            "passes": ", ".join(f"{event.action} by {event.pass_name}" for event in node.history),
            "fill": _fill(node),
        }
        network.add_node(node.name, **facts)
        network.add_edges_from((name, node.name) for name in node.inputs)
    return network


def _fill(node: NodeRecord) -> str:
    if node.collective is not None:
        return _COLLECTIVE
    return _WAIT if node.target.endswith("wait_tensor.default") else _FILL.get(node.op, _COMPUTE)


def _graphviz(graph: GraphRecord, network: nx.DiGraph[str]) -> str:
    lines = [
        f"digraph {_quoted(graph.graph)} {{",
        '  node [shape=box, style=filled, fontname="monospace", fontsize=10];',
    ]
    for name, facts in network.nodes(data=True):
        parts = [
            name,
            facts["target"] if facts["op"] == "call_function" else facts["op"],
            facts["values"],
            facts["source"],
        ]
        label = "\\n".join(_escaped(part) for part in parts if part)
        lines.append(f'  {_quoted(name)} [label="{label}", fillcolor="{facts["fill"]}"];')
    for source, target in network.edges():
        size = bytes_text(network.nodes[source]["bytes"])
        lines.append(f'  {_quoted(source)} -> {_quoted(target)} [label="{size}", fontsize=8];')
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dump_argument(parser)
    parser.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
    parser.add_argument(
        "--format", choices=("dot", "graphml"), default="dot", help="output format: Graphviz (default) or GraphML"
    )
    parser.add_argument("--around", metavar="NODE", help="only this node and its neighbours")
    parser.add_argument(
        "--radius",
        type=int,
        default=2,
        help="largest distance from the node of --around, in edges of either direction (default: 2)",
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write to this file (default: stdout)")


COMMAND = Command(
    name="dot",
    help="export a graph, or the nodes around one node, to Graphviz or GraphML",
    description="Export a graph to Graphviz or GraphML: `dsgraph dot DIR forward --around mm_3 | dot -Tsvg > mm_3.svg`."
    " Collectives are orange, their waits light orange, and edges are labelled with bytes.",
    configure=_configure,
    run=dot,
)
