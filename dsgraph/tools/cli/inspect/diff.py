"""`dsgraph diff`: what changed between two graphs."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dsgraph.tools.cli.command import Answer, Command
from dsgraph.tools.dumping.records import GraphRecord, NodeRecord
from dsgraph.tools.dumping.render import listed, render_node
from dsgraph.utils.json_records import to_json

from .compare_graphs import Change, GraphDifference, compare
from .dumps import GRAPH_HELP, Dump, add_dump_argument, add_most_argument


def diff(args: argparse.Namespace) -> Answer:
    """Compare graph A with graph B, of the same dump or of `--with`."""
    dump = Dump(args.dir)
    first = dump.graph(args.a)
    second = (dump if args.other is None else Dump(args.other)).graph(args.b)
    difference = compare(first.nodes, second.nodes)
    names = [_name(first), _name(second)]
    if args.other is not None:
        names = [f"{folder}/{name}" for folder, name in zip((args.dir, args.other), names, strict=True)]
    text = describe(names, difference, most=args.most)
    return Answer(text, {"a": names[0], "b": names[1], **_data(difference)}, code=0 if difference.is_empty else 1)


def _name(graph: GraphRecord) -> str:
    return f"rank{graph.rank}/compile{graph.compile}/{graph.graph}"


def describe(names: Sequence[str], difference: GraphDifference, *, most: int) -> str:
    """Return a difference in words, at most `most` lines of each kind."""
    counts = (
        f"{len(difference.removed)} nodes removed, {len(difference.added)} added, {len(difference.changed)} changed, "
        f"{len(difference.moved)} moved; {difference.same} are the same (names and order are ignored)"
    )
    lines = [f"{names[0]} -> {names[1]}: {counts}"]
    for sign, nodes in (("-", difference.removed), ("+", difference.added), (">", difference.moved)):
        lines += [f"{sign}{sign} {_by_target(nodes)}"] if nodes else []
        lines += _some([f"{sign} {render_node(node)}" for node in nodes], most)
    changes = ["\n".join(_change(change)) for change in difference.changed]
    return "\n".join([*lines, *_some(changes, most)])


def _by_target(nodes: Sequence[NodeRecord]) -> str:
    counts = Counter(node.target if node.op == "call_function" else node.op for node in nodes)
    return listed([f"{count} {target}" for target, count in counts.most_common()], most=6)


def _change(change: Change) -> list[str]:
    return [f"! {', '.join(change.what)}", f"  - {render_node(change.before)}", f"  + {render_node(change.after)}"]


def _some(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"  ... {len(lines) - most} more (--most)"]


def _data(difference: GraphDifference) -> dict[str, object]:
    changed = [
        {"what": list(change.what), "before": to_json(change.before), "after": to_json(change.after)}
        for change in difference.changed
    ]
    return {
        "removed": to_json(difference.removed),
        "added": to_json(difference.added),
        "moved": to_json(difference.moved),
        "changed": changed,
        "same": difference.same,
    }


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dump_argument(parser)
    parser.add_argument("a", metavar="A", help=GRAPH_HELP)
    parser.add_argument("b", metavar="B", help="the graph to compare A with, named in the same way")
    parser.add_argument("--with", dest="other", metavar="DIR2", type=Path, help="read B from this dump of another run")
    add_most_argument(parser, "number of lines of each kind to print", 40)


COMMAND = Command(
    name="diff",
    help="show what changed between two passes, two ranks or two runs",
    description="Compare two graphs node by node: - removed, + added, > moved, ! changed. Nodes are matched by their "
    "computation, so a new name is not a difference. Exit code 1: the graphs differ.",
    configure=_configure,
    run=diff,
)
