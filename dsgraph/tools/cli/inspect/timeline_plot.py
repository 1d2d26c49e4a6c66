"""A picture of timelines: a lane for computation, one for each process group and tier, over predicted time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dsgraph.tools.dumping.records import NodeRecord
from dsgraph.tools.dumping.render import ms_text

from . import plots
from .dumps import GraphName
from .timeline import Timeline, Transfer

Span = tuple[float, float]
"""Start and end, in seconds."""

_NAMED = 3  # waits of a graph that are named in the picture: the longest
_LEAST_NAMED = 0.02  # shorter ones, as a share of the whole time, would be named in a place that nobody sees
_WIDEST = 4.0  # most width of a picture, relative to the narrowest one next to it
_LANE, _BAR = 10.0, 7.0


def draw(timelines: Sequence[tuple[GraphName, Timeline]], why: Callable[[NodeRecord], str], path: Path) -> None:
    """Draw each compile's graphs side by side, compiles one below the other.

    Args:
        timelines: With at least one transfer among them.
        why: Names what a collective or a transfer is for.
        path: Where to.

    Raises:
        CommandError: matplotlib is not installed, or the file cannot be written.
    """
    rows: dict[tuple[int, int], list[tuple[GraphName, Timeline]]] = {}
    for name, timeline in timelines:
        rows.setdefault((name.rank, name.compile), []).append((name, timeline))
    most_lanes = 1 + max(len(_groups(timeline)) for _, timeline in timelines)
    figure, axes = plots.new_grid(widths=_widths(list(rows.values())), rows=len(rows), height=1.5 + 0.35 * most_lanes)
    for row, line in zip(rows.values(), axes, strict=True):
        for item, axis in zip(row, line, strict=False):
            _draw_lanes(axis, *item, why)
        for axis in line[len(row) :]:
            axis.set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    plots.save(figure, path)


def overlaps(timeline: Timeline) -> list[Span]:
    """Return the spans in which the device computes while something is being sent."""
    computing = _merged((start, end) for _, start, end in timeline.computed)
    sending = _merged((transfer.start, transfer.end) for transfer in timeline.transfers)
    found, at = [], 0
    for start, end in computing:
        while at < len(sending) and sending[at][1] <= start:
            at += 1
        later = at
        while later < len(sending) and sending[later][0] < end:
            found.append((max(start, sending[later][0]), min(end, sending[later][1])))
            later += 1
    return found


def _draw_lanes(axis: Any, name: GraphName, timeline: Timeline, why: Callable[[NodeRecord], str]) -> None:
    groups = _groups(timeline)
    top = _LANE * len(groups)
    for number, (start, end) in enumerate(overlaps(timeline)):
        label = "overlap" if number == 0 else None
        axis.axvspan(1000 * start, 1000 * end, color="tab:green", alpha=0.15, linewidth=0, label=label)
    compute = [(start, end) for _, start, end in timeline.computed]
    waits = [(transfer.end - transfer.exposed, transfer.end) for transfer in timeline.transfers if transfer.exposed]
    _bars(axis, compute, top, "tab:blue", "compute")
    for number, group in enumerate(groups):
        sends = [(transfer.start, transfer.end) for transfer in timeline.transfers if _lane(transfer) == group]
        _bars(axis, sends, top - _LANE * (number + 1), "tab:orange", "communication" if number == 0 else None)
    _bars(axis, waits, top, "tab:red", "exposed: compute waits")
    legend = [""]
    for number, transfer in enumerate(_to_name(timeline), start=1):
        middle = 1000 * (transfer.end - transfer.exposed / 2)
        axis.text(middle, top + _BAR + 1, str(number), fontsize=7, ha="center", color="tab:red")
        legend.append(f"{number}: {ms_text(transfer.exposed)} ms for {why(transfer.node)}")
    axis.set_yticks([_LANE * lane + _BAR / 2 for lane in range(len(groups) + 1)], [*reversed(groups), "compute"])
    axis.set_ylim(-1, top + _BAR + 5)
    axis.set_xlim(0, max(1000 * timeline.seconds, 1e-6))
    axis.set_xlabel("predicted ms" + "\n".join(legend), fontsize=7, linespacing=1.4)
    axis.set_title(f"{name}\n{ms_text(timeline.seconds)} ms, {ms_text(timeline.exposed)} ms of it exposed", fontsize=9)


def _bars(axis: Any, spans: Iterable[Span], bottom: float, colour: str, label: str | None) -> None:
    bars = [(1000 * start, 1000 * (end - start)) for start, end in spans]
    axis.broken_barh(bars, (bottom, _BAR), facecolors=colour, edgecolor="white", linewidth=0.2, label=label)


def _to_name(timeline: Timeline) -> list[Transfer]:
    longest = sorted(timeline.transfers, key=lambda transfer: -transfer.exposed)[:_NAMED]
    return [transfer for transfer in longest if transfer.exposed >= _LEAST_NAMED * timeline.seconds > 0]


def _groups(timeline: Timeline) -> list[str]:
    return list(dict.fromkeys(map(_lane, timeline.transfers)))


def _lane(transfer: Transfer) -> str:
    found = transfer.node.collective
    if found is None:
        assert transfer.node.transfer is not None
        return f"to and from {transfer.node.transfer.tier}"
    return f"{found.axis} ({found.ranks} ranks)" if found.axis else f"group {found.group}"


def _widths(rows: Sequence[Sequence[tuple[GraphName, Timeline]]]) -> list[float]:
    """Return the width of each column: a millisecond is equally long in each, unless a column would be too narrow."""
    columns = max(map(len, rows))
    longest = [
        max((row[column][1].seconds for row in rows if column < len(row)), default=0) for column in range(columns)
    ]
    widest = max(longest)
    return [max(seconds, widest / _WIDEST) if widest else 1.0 for seconds in longest]


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged
