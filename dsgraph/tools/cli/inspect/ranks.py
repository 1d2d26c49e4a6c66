"""`dsgraph ranks`: do all ranks run the same?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.dumping.records import GraphRecord, NodeRecord
from dsgraph.tools.dumping.render import render_node

from .dumps import Dump, GraphName, add_dump_argument


@dataclass(frozen=True)
class RankDifference:
    """The first place where a rank differs from the first rank."""

    rank: int
    where: str
    first: str
    other: str


def ranks(args: argparse.Namespace) -> Answer:
    """Compare each rank's graphs with the first rank's, in the order in which they came about."""
    dump = Dump(args.dir)
    first, *others = dump.ranks
    if not others:
        raise CommandError(f"{args.dir} has only rank {first}: nothing to compare")
    partings, sizes, graphs = [], 0, 0
    for rank in others:
        parting, differing, seen = _compare(dump, first, rank)
        sizes, graphs = sizes + differing, graphs + seen
        partings += [parting] if parting is not None else []
    data = {
        "ranks": dump.ranks,
        "differences": [vars(item) for item in partings],
        "nodes_of_other_size": sizes,
    }
    if not partings:
        uneven = f"; {sizes} nodes differ only in sizes, because rows do not divide evenly" if sizes else ""
        return Answer(f"ranks {', '.join(map(str, dump.ranks))} run the same graphs: {graphs} compared{uneven}", data)
    lines = [
        f"rank {item.rank} differs from rank {first}, first in {item.where}:\n  rank {first}: {item.first}\n"
        f"  rank {item.rank}: {item.other}"
        for item in partings
    ]
    return Answer("\n".join(lines), data, code=1)


def _compare(dump: Dump, first: int, other: int) -> tuple[RankDifference | None, int, int]:
    """Return the first difference in meaning, how many nodes differ in sizes alone, how many graphs were compared."""
    sizes = seen = 0
    for mine, theirs in zip_longest(dump.compiles(first), dump.compiles(other)):
        if mine is None or theirs is None:
            there = (mine or theirs).compile
            texts = ["it exists" if record is not None else "nothing" for record in (mine, theirs)]
            return RankDifference(other, f"compile {there}", *texts), sizes, seen
        for a, b in zip_longest(mine.steps, theirs.steps):
            where = f"compile {mine.compile}"
            if a is None or b is None or a.graph != b.graph:
                texts = [step.graph if step is not None else "nothing more" for step in (a, b)]
                return RankDifference(other, f"{where}: the passes", *texts), sizes, seen
            if (a.same_as and b.same_as) or a.left_out or b.left_out:
                continue
            names = [GraphName(rank, mine.compile, a.graph) for rank in (first, other)]
            seen += 1
            if dump.has_same_nodes(*names):
                continue
            graphs = [dump.read(name) for name in names]
            parting, differing = _first_difference(*graphs)
            sizes += differing
            if parting is not None:
                by = f", after pass {a.pass_name}" if a.pass_name else ", before any pass"
                return RankDifference(other, f"{where}, {a.graph}, node {parting[0]}{by}", *parting[1:]), sizes, seen
    return None, sizes, seen


def _first_difference(first: GraphRecord, other: GraphRecord) -> tuple[tuple[int, str, str] | None, int]:
    sizes = abs(len(first.nodes) - len(other.nodes))
    for a, b in zip_longest(_meanings(first), _meanings(other)):
        if a is None or b is None or a.meaning != b.meaning:
            texts = [render_node(item.node) if item is not None else "nothing more" for item in (a, b)]
            place = (a or b).place
            return (place, texts[0], texts[1]), sizes
        sizes += a.node.values != b.node.values
    return None, sizes


@dataclass(frozen=True)
class _Item:
    place: int
    node: NodeRecord
    meaning: tuple[object, ...]


def _meanings(graph: GraphRecord) -> Iterator[_Item]:
    """Yield what must be equal on all ranks: all but sizes, and padding of rows that do not divide evenly."""
    numbers: dict[str, int] = {}  # of nodes as all ranks count them, because names may differ
    count = 0
    for place, node in enumerate(graph.nodes):
        if _only_fits_rows(node):
            numbers[node.name] = numbers[node.inputs[0]]
            continue
        numbers[node.name] = count
        count += 1
        inputs = tuple(numbers[name] for name in node.inputs)
        kinds = tuple((value.dtype, len(value.shape)) for value in node.values)
        sent = node.collective
        talks = (sent.kind, sent.axis or sent.group, sent.ranks, sent.parameters) if sent is not None else ()
        yield _Item(place, node, (node.op, node.target, inputs, node.parameter, kinds, talks))


def _only_fits_rows(node: NodeRecord) -> bool:
    """Return whether a pass added the node to pad rows or to cut padding off, which some ranks may not need."""
    is_made = any(event.action == "made" for event in node.history)
    return is_made and node.target in ("aten.constant_pad_nd.default", "aten.slice.Tensor")


COMMAND = Command(
    name="ranks",
    help="compare the graphs of all ranks, and show the first difference",
    description="Compare the graphs of all ranks with those of the first rank, pass by pass, and print the first node "
    "that differs and the pass that caused it. Sizes may differ where rows do not divide evenly. Exit code 1: ranks "
    "differ.",
    configure=add_dump_argument,
    run=ranks,
)
