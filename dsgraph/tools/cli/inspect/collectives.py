"""`dsgraph collectives`: why each collective is there, and what it costs."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.table import table
from dsgraph.tools.cli.trace import Span, write_trace
from dsgraph.tools.dumping.records import GraphRecord, NodeRecord, TransferRecord
from dsgraph.tools.dumping.render import bytes_text, listed, ms_text
from dsgraph.tools.dumping.units import runs_of, runs_text

from .dumps import Dump, GraphName, add_dump_argument, add_graphs_argument, chosen_graphs
from .timeline import Timeline, Transfer, critical_path, simulate

_NOTHING = TransferRecord(kind="", tier="", bytes=0, seconds=0.0)  # of a node that moves nothing


def collectives(args: argparse.Namespace) -> Answer:
    """Return each collective of the graphs that finally run, or of one graph."""
    dump = Dump(args.dir)
    names = chosen_graphs(dump, args.graph)
    graphs = [(name, dump.read(name)) for name in names]
    for name, graph in graphs:
        if graph.phase not in ("forward", "backward"):
            raise CommandError(f"{name} never runs (an intermediate graph): name a forward or backward graph")
    timelines = [(name, graph, simulate(graph)) for name, graph in graphs]
    if args.trace is not None:
        write_trace((span for name, _, timeline in timelines for span in _spans(str(name), timeline)), args.trace)
    modules = runs_of(dump.units(names[0].rank))
    of_step = (record.compile for record in dump.compiles(names[0].rank) if record.is_step and record.in_step)
    step = max(of_step, default=0)
    users = {name: modules.get(name.compile, ()) for name in names}
    runs = {name: 1 if name.compile == step else len(users[name]) for name in names}
    parts = [_describe(f"{name}{runs_text(users[name])}", graph, timeline) for name, graph, timeline in timelines]
    if args.graph is None and (step or max(runs.values()) > 1):
        newest = [timeline for name, _, timeline in timelines if name.compile == step]
        parts.append(_total([(runs[name], timeline) for name, _, timeline in timelines], newest))
    parts += [f"{args.trace}: compute and communication over time"] if args.trace is not None else []
    return Answer("\n\n".join(parts), [_data(name, graph, timeline, runs[name]) for name, graph, timeline in timelines])


def _spans(graph: str, timeline: Timeline) -> Iterator[Span]:
    """Yield the computation of a graph, its waits, and its transfers."""
    for node, start, end in timeline.computed:
        yield Span(node.name, graph, "compute", start, end - start)
    for transfer in timeline.transfers:
        why, lane = _why(transfer.node), _axis(transfer.node)
        if transfer.exposed:
            yield Span(f"for {why}", graph, "compute waits", transfer.end - transfer.exposed, transfer.exposed)
        yield Span(f"{transfer.node.name}: {why}", graph, lane, transfer.start, transfer.end - transfer.start)


def _axis(node: NodeRecord) -> str:
    """Return the ranks or the tier that a transfer is to or from."""
    found = node.collective
    if found is None:
        return f"to and from {(node.transfer or _NOTHING).tier}"
    return f"{found.axis} ({found.ranks})" if found.axis else f"group {found.group}"


def _total(timelines: list[tuple[int, Timeline]], of_step: list[Timeline]) -> str:
    """Return the sums over all runs of the graphs in a step; the graph of the step has the time of its units."""
    count = sum(runs * len(timeline.collectives) for runs, timeline in timelines)
    sent = sum(runs * _sent(timeline) for runs, timeline in timelines)
    seconds = sum(runs * timeline.seconds for runs, timeline in ([(1, each) for each in of_step] or timelines))
    return (
        f"all graphs of a step: {count} collectives, {bytes_text(sent)} sent per rank; predicted {ms_text(seconds)} ms"
    )


def _sent(timeline: Timeline) -> int:
    return sum(transfer.node.collective.sent or 0 for transfer in timeline.collectives if transfer.node.collective)


def _describe(name: str, graph: GraphRecord, timeline: Timeline) -> str:
    if not timeline.collectives:
        return f"{name}: no collectives{_moves(timeline)}"
    headers = ["node", "kind", "why", "axis", "sent", "ms", "exposed ms", "queued ms", "overlaps with"]
    listing = table([_row(transfer) for transfer in timeline.collectives], headers, right=(4, 5, 6, 7))
    path = critical_path(graph)
    on_path = [node for node in path if node.collective is not None]
    sent = _sent(timeline)
    computing = sum(end - start for _, start, end in timeline.computed)
    return (
        f"{name}: {len(timeline.collectives)} collectives, {bytes_text(sent)} sent per rank; predicted "
        f"{ms_text(timeline.seconds)} ms, of which {ms_text(computing)} ms compute and "
        f"{ms_text(timeline.exposed)} ms wait"
        f"{_queue(timeline)}\n{listing}\n"
        f"critical path: {len(path)} nodes, of them collectives: {listed([node.name for node in on_path]) or 'none'}"
        f"{_moves(timeline)}"
    )


def _moves(timeline: Timeline) -> str:
    """Return the transfers between memory and tiers below it."""
    if not timeline.moves:
        return ""
    total = sum(move.node.transfer.bytes for move in timeline.moves if move.node.transfer)
    headers = ["node", "tier", "why", "bytes", "ms", "exposed ms", "queued ms", "overlaps with"]
    listing = table(list(map(_row, timeline.moves)), headers, right=(3, 4, 5, 6))
    return f"\n{len(timeline.moves)} transfers, {bytes_text(total)}\n{listing}"


def _queue(timeline: Timeline) -> str:
    """Return how much of the waiting is queueing for other transfers, before the awaited one has begun."""
    queued = sum(transfer.queued for transfer in timeline.transfers)
    return f" ({ms_text(queued)} ms of it in the queue behind other collectives)" if queued else ""


def _row(transfer: Transfer) -> list[str]:
    node, collective, moved = transfer.node, transfer.node.collective, transfer.node.transfer or _NOTHING
    how = [collective.kind, _why(node), _axis(node)] if collective else [moved.tier, _why(node)]
    seconds = ((collective.seconds or 0.0) if collective else moved.seconds, transfer.exposed, transfer.queued)
    size = bytes_text(collective.sent if collective else moved.bytes)
    return [node.name, *how, size, *map(ms_text, seconds), _overlaps(transfer)]


def _why(node: NodeRecord) -> str:
    """Return the parameters that it serves; if there are none, the pass that made it, or the user's line."""
    served = (node.collective or node.transfer or _NOTHING).parameters
    if served:
        return listed(served, most=2)
    makers = [event.pass_name for event in node.history if event.action == "made"]
    return f"pass {makers[0]}" if makers else f"yours, {node.source}" if node.source else "?"


def _overlaps(transfer: Transfer) -> str:
    """Return the modules, or the ops, whose computation hides it; those that take longest first."""
    seconds: Counter[str] = Counter()
    for node in transfer.behind:
        seconds[node.module or node.target] += node.seconds  # type: ignore[assignment]
    return listed([place for place, _ in seconds.most_common()], most=2)


def _data(name: GraphName, graph: GraphRecord, timeline: Timeline, runs: int) -> dict[str, Any]:
    return {
        "graph": str(name),
        "runs": runs,
        "seconds": timeline.seconds,
        "collectives": list(map(_transfer_data, timeline.collectives)),
        "transfers": list(map(_transfer_data, timeline.moves)),
        "critical_path": [node.name for node in critical_path(graph)],
    }


def _transfer_data(transfer: Transfer) -> dict[str, Any]:
    return {
        "node": transfer.node.name,
        "why": _why(transfer.node),
        **asdict(transfer.node.collective or transfer.node.transfer or _NOTHING),
        "start": transfer.start,
        "end": transfer.end,
        "exposed": transfer.exposed,
        "queued": transfer.queued,
        "overlaps_with": [node.name for node in transfer.behind],
    }


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dump_argument(parser)
    add_graphs_argument(parser)
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write what runs over time, for ui.perfetto.dev")


COMMAND = Command(
    name="collectives",
    help="list the collectives: their reason, bytes, time and overlap",
    description="List each collective: its reason (the parameter that it gathers, the gradient that it reduces, or the "
    "pass that created it), bytes that a rank sends, predicted time, the time that computation waits for it, the part "
    "of that wait in a queue after other collectives, and the computation that it overlaps with. Then list transfers "
    "between memory and a tier below it (host, disk), and the critical path. --trace writes the predicted timeline of "
    "each graph as Chrome trace events: a lane for computation, one for its waits, and one for each process group and "
    "tier.",
    configure=_configure,
    run=collectives,
)
