"""`dsgraph show`: one graph."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.dumping.records import GraphRecord, NodeRecord
from dsgraph.tools.dumping.render import Paint, plain, render_graph
from dsgraph.utils.json_records import to_json

from .dumps import GRAPH_HELP, Dump, add_dump_argument

_COLOURS = {"comment": "90", "type": "36", "op": "33", "name": "1"}


def show(args: argparse.Namespace) -> Answer:
    """Return a graph, or the nodes of it that the filters leave."""
    dump = Dump(args.dir)
    name = dump.find(args.graph)
    graph = dump.read(name)
    nodes = [node for node in graph.nodes if _is_wanted(node, args)]
    has_filter = any((args.op, args.module, args.pass_name))
    if has_filter and not nodes:
        raise CommandError(f"no node of {graph.graph} matches the filters{_offer(graph, args)}")
    text = render_graph(graph, nodes if has_filter else None, paint=_paint(args.colour))
    same_as = dump.step(name).same_as
    if same_as:
        text = f"# {name.graph}: the pass changed nothing; this is {same_as}\n{text}"
    if has_filter:
        text += f"# {len(nodes)} of {len(graph.nodes)} nodes\n"
    data = {"graph": str(name), "same_as": same_as, "nodes": [to_json(node) for node in nodes]}
    return Answer(text.rstrip("\n"), data)


def _is_wanted(node: NodeRecord, args: argparse.Namespace) -> bool:
    if args.op and not any(fnmatch.fnmatch(node.target, f"*{op}*") for op in args.op):
        return False
    if args.module and not any(
        node.module == module or fnmatch.fnmatch(node.module, module) or node.module.startswith(f"{module}.")
        for module in args.module
    ):
        return False
    return not args.pass_name or any(event.pass_name in args.pass_name for event in node.history)


def _offer(graph: GraphRecord, args: argparse.Namespace) -> str:
    if args.pass_name:
        known = sorted({event.pass_name for node in graph.nodes for event in node.history})
    elif args.module:
        known = sorted({node.module for node in graph.nodes if node.module})
    else:
        known = sorted({node.target for node in graph.nodes if node.op == "call_function"})
    return f"; it has {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}" if known else ""


def _paint(when: str) -> Paint:
    on_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if when == "never" or (when == "auto" and not on_terminal):
        return plain
    return lambda kind, text: f"\033[{_COLOURS[kind]}m{text}\033[0m"


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dump_argument(parser)
    parser.add_argument("graph", metavar="GRAPH", help=GRAPH_HELP)
    parser.add_argument(
        "--op", action="append", help="only ops whose name contains this; * is a wildcard; may be repeated"
    )
    parser.add_argument(
        "--module", action="append", help="only nodes of this module and its submodules; * is a wildcard"
    )
    parser.add_argument(
        "--pass", dest="pass_name", action="append", help="only nodes that this pass created or changed"
    )
    parser.add_argument(
        "--colour",
        choices=("auto", "always", "never"),
        default="auto",
        help="use colours (default: auto, on a terminal)",
    )


COMMAND = Command(
    name="show",
    help="print one graph, or the nodes that match filters",
    description="Print a graph as Python, with shapes, dtypes and devices, the module and the line of the model, "
    "and the changes that passes made to each node.",
    configure=_configure,
    run=show,
)
