"""`dsgraph memory`: the tensors that are alive at each moment."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.table import table
from dsgraph.tools.dumping.records import CompileRecord, GraphRecord, NodeRecord, PieceRecord
from dsgraph.tools.dumping.render import bytes_text
from dsgraph.tools.dumping.units import runs_of, runs_text

from . import plots
from .dumps import Dump, GraphName, add_dump_argument, add_graphs_argument, add_most_argument, chosen_graphs

_ROWS = 16
_WIDTH = 50
PLANNED = "plan_activations"  # `dsgraph.passes.memory.fit.PLANNED`, read without torch


def memory(args: argparse.Namespace) -> Answer:
    """Return live bytes of the graphs that finally run, or of one graph."""
    if args.plot is not None:
        plots.check_path(args.plot)
    dump = Dump(args.dir)
    graphs = [(name, dump.read(name)) for name in chosen_graphs(dump, args.graph)]
    for name, graph in graphs:
        if not graph.live:
            raise CommandError(f"{name} never runs (an intermediate graph): name a forward or backward graph")
    if args.plot is not None:
        _plot(graphs, args.plot)
    runs = runs_of(dump.units(graphs[0][0].rank))
    parts = [_describe(f"{name}{runs_text(runs.get(name.compile, ()))}", graph, args.most) for name, graph in graphs]
    plans = {(name.rank, name.compile): plan_of(dump.compile(name.rank, name.compile)) for name, _ in graphs}
    parts += [
        "\n".join([f"rank {rank}, compile {compiled}: tensors that the backward needs, under memory_limit", *lines])
        for (rank, compiled), lines in plans.items()
        if lines
    ]
    parts += [f"{args.plot}: live bytes over the program"] if args.plot is not None else []
    return Answer("\n\n".join(parts), [_data(name, graph) for name, graph in graphs])


def plan_of(compiled: CompileRecord) -> tuple[str, ...]:
    """Return which values were saved and which are recomputed to keep a limit, a line each; empty without a limit."""
    return next((step.done for step in compiled.steps if step.pass_name == PLANNED), ())


def _describe(name: str, graph: GraphRecord, most: int) -> str:
    peak, at = max(graph.live), graph.live.index(max(graph.live))
    node = graph.nodes[at]
    alive = by_origin(graph, alive_at(graph, at))
    rows = [[bytes_text(size), str(count), place] for place, size, count in alive[:most]]
    if len(alive) > most:
        rows.append([bytes_text(sum(size for _, size, _ in alive[most:])), "", f"{len(alive) - most} more (--most)"])
    listing = table(rows, ["bytes", "values", "from"], right=(0, 1))
    where = f" ({node.source})" if node.source else ""
    return (
        f"{name}: peak {bytes_text(peak)} at {node.name}{where}, node {at} of {len(graph.nodes)}\n"
        f"{_curve(graph)}\nalive at the peak:\n{listing}"
    )


def _curve(graph: GraphRecord) -> str:
    """Return live bytes over the program, one bar for every so many nodes."""
    peak, count = max(graph.live), len(graph.live)
    lines = []
    rows = min(_ROWS, count)
    for row in range(rows):
        start, end = row * count // rows, (row + 1) * count // rows
        most = max(graph.live[start:end])
        module = next((node.module for node in graph.nodes[start:end] if node.module), "")
        lines.append(
            f"{start:>6} {'#' * round(_WIDTH * most / peak if peak else 0):<{_WIDTH}} {bytes_text(most):>8}  {module}"
        )
    return "\n".join(lines)


def _data(name: GraphName, graph: GraphRecord) -> dict[str, Any]:
    at = graph.live.index(max(graph.live))
    alive = alive_at(graph, at)
    return {
        "graph": str(name),
        "live": list(graph.live),
        "peak": max(graph.live),
        "node": graph.nodes[at].name,
        "alive": [{"node": allocator(piece), "bytes": piece.bytes, "kind": piece.kind} for piece in alive],
        "by_origin": [
            {"from": place, "bytes": size, "values": count} for place, size, count in by_origin(graph, alive)
        ],
    }


def _plot(graphs: list[tuple[GraphName, GraphRecord]], path: Path) -> None:
    figure, axes = plots.new_figure(rows=len(graphs), height=2.4)
    for axis, (name, graph) in zip(axes, graphs, strict=True):
        live = [size / 1e6 for size in graph.live]
        at = graph.live.index(max(graph.live))
        axis.fill_between(range(len(live)), live, step="mid", alpha=0.6)
        where = graph.nodes[at].source or graph.nodes[at].name
        axis.annotate(
            f"{bytes_text(max(graph.live))} at {where}",
            (at, live[at]),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=8,
            ha="center",
        )
        axis.set_ylim(0, 1.15 * live[at] or 1)
        axis.set_title(str(name), fontsize=10)
        axis.set_xlabel("node")
        axis.set_ylabel("MB alive")
    plots.save(figure, path)


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dump_argument(parser)
    add_graphs_argument(parser)
    add_most_argument(parser, "number of lines of the model to list", 12)
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw live bytes over the program: .svg or .png")


COMMAND = Command(
    name="memory",
    help="show live bytes over the program, and what is alive at the peak",
    description="Show the predicted bytes that are alive while each node of a graph runs, inputs included, and the "
    "lines of the model whose values are alive at the peak. Gradients, optimizer state and the memory of other graphs "
    "are not included.",
    configure=_configure,
    run=memory,
)


def pieces_of(graph: GraphRecord, node: NodeRecord) -> list[PieceRecord]:
    """Return the pieces of memory that a node's results lie in."""
    holder = node.shares or node.name
    return [piece for piece in graph.memory if allocator(piece) == holder]


def alive_at(graph: GraphRecord, place: int) -> list[PieceRecord]:
    """Return the pieces of memory that are alive while node number `place` runs, largest first."""
    return sorted(
        (piece for piece in graph.memory if piece.first <= place <= piece.last), key=lambda piece: -piece.bytes
    )


def by_origin(graph: GraphRecord, pieces: Iterable[PieceRecord]) -> list[tuple[str, int, int]]:
    """Return pieces by where in the user's model they are from: (place, bytes, number of pieces), largest first."""
    nodes = {node.name: node for node in graph.nodes}
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for piece in pieces:
        entry = sums[_origin(nodes[allocator(piece)])]
        entry[0] += piece.bytes
        entry[1] += 1
    return sorted(((place, size, count) for place, (size, count) in sums.items()), key=lambda row: -row[1])


def allocator(piece: PieceRecord) -> str:
    """Return the node that allocates a piece."""
    return piece.node.partition(":")[0]


def _origin(node: NodeRecord) -> str:
    if node.op == "placeholder":
        saved = f"saved: {node.source}  {node.code}" if node.source else "inputs"
        return "parameters" if node.parameter else saved
    return f"{node.source}  {node.code}" if node.source else "passes and autograd"
