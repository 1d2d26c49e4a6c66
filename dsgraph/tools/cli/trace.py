"""Timelines as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .command import CommandError


@dataclass(frozen=True)
class Span:
    """A bar of a timeline.

    Attributes:
        name: Its label.
        process: The group of lanes that it is in, such as a graph.
        lane: Its lane in the group.
        start: In seconds.
        seconds: Its length.
    """

    name: str
    process: str
    lane: str
    start: float
    seconds: float


def write_trace(spans: Iterable[Span], path: Path) -> None:
    """Write spans to a file; lanes are in the order of their first spans.

    Raises:
        CommandError: The file cannot be written.
    """
    lanes: dict[str, dict[str, int]] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        known = lanes.setdefault(span.process, {})
        place = {"pid": list(lanes).index(span.process), "tid": known.setdefault(span.lane, len(known))}
        events.append({"ph": "X", "name": span.name, "ts": 1e6 * span.start, "dur": 1e6 * span.seconds, **place})
    for number, (process, known) in enumerate(lanes.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": process}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": number, "tid": lane, "args": {"name": name}}
            for name, lane in known.items()
        ]
    try:
        path.write_text(json.dumps({"traceEvents": events}))
    except OSError as error:
        raise CommandError(f"--trace: {path} cannot be written: {error.strerror}") from None
