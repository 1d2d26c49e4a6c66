"""`dsgraph schedule`: in which order a pipeline's ranks work, and how long they wait."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dsgraph.tools.cli.command import Answer, Command, CommandError
from dsgraph.tools.cli.table import table
from dsgraph.tools.cli.trace import Span, write_trace
from dsgraph.utils.errors import OptionError

if TYPE_CHECKING:
    from dsgraph.parallel.pipeline.schedule_order import Slot

_WIDEST = 120  # characters of a line of the timeline
_LABELS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


def schedule(args: argparse.Namespace) -> Answer:
    """Return the order of a schedule's actions, run through on paper."""
    from dsgraph.parallel.pipeline.schedule_order import bubble_share, check_order, stages_of_ranks
    from dsgraph.tools.planning.schedules import actions_on_paper

    kind = _kind(args.kind)
    if args.ranks is not None and args.ranks < 1:
        raise CommandError(f"--ranks is {args.ranks}; it takes 1 or more")
    if args.microbatches < args.stages:
        raise CommandError(
            f"--microbatches is {args.microbatches}; it takes at least as many as --stages, {args.stages}"
        )
    ranks = args.ranks or _usual_ranks(kind, args.stages)
    try:
        held = stages_of_ranks(kind, ranks=ranks, stages=args.stages)
        actions = actions_on_paper(kind, ranks=ranks, stages=args.stages, microbatches=args.microbatches)
        slots = check_order(actions, stages=args.stages)
    except OptionError as error:
        raise CommandError(str(error).removeprefix("pipeline: ")) from None
    bubble, length = bubble_share(slots), max(slot.end for slot in slots)
    if args.trace is not None:
        write_trace(itertools.chain.from_iterable(_spans(slot, kind) for slot in slots), args.trace)
    title = f"{kind}: {args.stages} stages on {ranks} ranks, {args.microbatches} micro-batches"
    rows = [[str(rank), " ".join(map(str, stages)), _line(slots, rank)] for rank, stages in enumerate(held)]
    lines = [
        title,
        "",
        table(rows, ["rank", "stages", "work: F forward, B backward, I its inputs, W its weights, . waits"]),
        "",
        f"bubble: {bubble:.1%} of the ranks' time, predicted; {length:g} times a stage's forward",
    ]
    data = {
        "kind": kind,
        "stages_of_ranks": held,
        "bubble": bubble,
        "forwards": length,
        "slots": [{"rank": slot.rank, "action": slot.action, "start": slot.start, "end": slot.end} for slot in slots],
    }
    return Answer("\n".join(lines), data)


def _kind(text: str) -> str:
    """Return the schedule whose name this is, or begins with; capitals do not count."""
    from dsgraph.parallel.pipeline.schedule_order import SCHEDULES

    found = [kind for kind in SCHEDULES if kind.lower() == text.lower()]
    found = found or [kind for kind in SCHEDULES if kind.lower().startswith(text.lower())]
    if len(found) != 1:
        raise CommandError(f"--kind is {text!r}; it takes one of {', '.join(SCHEDULES)}")
    return found[0]


def _usual_ranks(kind: str, stages: int) -> int:
    """Return two stages a rank where the schedule accepts several and they divide evenly."""
    from dsgraph.parallel.pipeline.schedule_order import SCHEDULES

    return stages // 2 if SCHEDULES[kind] and stages % 2 == 0 else stages


def _line(slots: list[Slot], rank: int) -> str:
    """Return one character a unit of time."""
    line = ["."] * int(max(slot.end for slot in slots))
    for slot in slots:
        if slot.rank == rank:
            line[int(slot.start) : int(slot.end)] = "".join(kind * int(cost) for kind, cost in slot.kinds)
    text = "".join(line)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def _spans(slot: Slot, schedule: str) -> Iterator[Span]:
    """Yield the parts of an action; a forward of a stage takes a second."""
    start = slot.start
    for kind, cost in slot.kinds:
        yield Span(f"{_LABELS[kind]}: {slot.action}", schedule, f"rank {slot.rank}", start, cost)
        start += cost


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, required=True, help="number of stages of the pipeline")
    parser.add_argument("--microbatches", type=int, required=True, help="number of micro-batches of a step")
    parser.add_argument("--kind", default="1F1B", help="name of a schedule, or its beginning (default: 1F1B)")
    parser.add_argument(
        "--ranks",
        type=int,
        help="number of ranks (default: one per stage, or one per two stages where a rank runs two)",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline to a file, for ui.perfetto.dev")


COMMAND = Command(
    name="schedule",
    help="show the order of a pipeline schedule and its bubble",
    description="Simulate a pipeline schedule: show the work of each rank over time, and how long ranks wait. "
    "A forward takes one unit of time, a backward two, and sending none.",
    configure=_configure,
    run=schedule,
)
