"""`dsgraph explain`: everything about one node."""

from __future__ import annotations

import argparse

from dsgraph.tools.cli.command import Answer, Command
from dsgraph.tools.dumping.records import GraphRecord, NodeRecord
from dsgraph.tools.dumping.render import bytes_text, listed, render_node
from dsgraph.utils.json_records import to_json

from .dumps import GRAPH_HELP, Dump, GraphName, add_dump_argument, find_graph_of, find_node
from .memory import pieces_of


def explain(args: argparse.Namespace) -> Answer:
    """Return where a node comes from, what passes did to it, who uses it, how long it lives."""
    dump = Dump(args.dir)
    name = dump.find(args.graph) if args.graph else find_graph_of(dump, args.node)
    graph = dump.read(name)
    node = find_node(graph, args.node)
    users = [other for other in graph.nodes if node.name in other.inputs]
    lines = [f"{name}: {render_node(node)}"]
    lines += _origin(node)
    lines += [f"  {event.action} by {event.pass_name} ({event.phase})" for event in node.history]
    if not node.history:
        lines.append("  no pass changed it")
    lines += _communication(node)
    lines += [f"  reads {listed(node.inputs, most=8)}"] if node.inputs else []
    lines += [f"  used by {listed([user.name for user in users], most=8)}"] if users else ["  not used"]
    lines += _life(graph, node)
    if node.flops:
        lines.append(f"  {node.flops:,} FLOPs, {bytes_text(node.moved)} read and written")
    return Answer("\n".join(lines), _data(name, graph, node, users))


def _origin(node: NodeRecord) -> list[str]:
    lines = []
    if node.parameter:
        lines.append(f"  parameter {node.parameter}")
    if node.module:
        lines.append(f"  module {node.module}")
    if node.source:
        lines.append(f"  {node.source}: {node.code}")
    if node.recompute:
        lines.append(f"  for the backward: {node.recompute.replace('_', ' ')}")
    return lines


def _communication(node: NodeRecord) -> list[str]:
    found = node.collective
    if found is None:
        return []
    why = f" for {listed(found.parameters)}" if found.parameters else ""
    where = f"axis {found.axis} ({found.ranks} ranks)" if found.axis else f"group {found.group!r}, not of the mesh"
    return [
        f"  {found.kind} over {where}{why}: {bytes_text(found.sent)} per rank, awaited by {found.wait or 'no node'}"
    ]


def _life(graph: GraphRecord, node: NodeRecord) -> list[str]:
    pieces = pieces_of(graph, node)
    if graph.live and node.bytes and not pieces:
        return [f"  {bytes_text(node.bytes)} without memory of its own: computed inside the kernels that read it"]
    lines = []
    for piece in pieces:
        shared = f", in the memory of {node.shares}" if node.shares else ""
        last = graph.nodes[piece.last].name if piece.last < len(graph.nodes) else "the end and after it"
        lines.append(
            f"  {bytes_text(piece.bytes)} ({piece.kind}){shared}, alive from {graph.nodes[piece.first].name} to {last}"
        )
    return lines


def _data(name: GraphName, graph: GraphRecord, node: NodeRecord, users: list[NodeRecord]) -> dict[str, object]:
    return {
        "graph": str(name),
        "node": to_json(node),
        "users": [user.name for user in users],
        "memory": to_json(tuple(pieces_of(graph, node))),
    }


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dump_argument(parser)
    parser.add_argument("node", metavar="NODE", help="name of a node in `dsgraph show`")
    parser.add_argument(
        "--graph", metavar="GRAPH", help=f"{GRAPH_HELP}; default: the last graph that contains the node"
    )


COMMAND = Command(
    name="explain",
    help="show where a node comes from, which passes changed it and who uses it",
    description="Describe one node: the module and the line of the model that it comes from, what each pass did to it, "
    "its inputs, its users, its bytes, and the nodes between which they are alive.",
    configure=_configure,
    run=explain,
)
