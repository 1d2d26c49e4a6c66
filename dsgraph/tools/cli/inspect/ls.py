"""`dsgraph ls`: the contents of a dump."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dsgraph.tools.cli.command import Answer, Command
from dsgraph.tools.cli.table import table
from dsgraph.tools.dumping.records import CompileRecord
from dsgraph.tools.dumping.render import bytes_text
from dsgraph.tools.dumping.units import runs_of, runs_text
from dsgraph.utils.json_records import to_json

from .dumps import Dump, add_dump_argument

_HEADERS = ["graph", "changed", "nodes", "coll.", "sent", "peak", "ms", "verify ms"]


def list_dump(folder: str | Path, *, rank: int | None = None) -> Answer:
    """Return the compiles of one rank (default: the first), each with its passes.

    Raises:
        CommandError: `folder` is no dump, or has not that rank.
    """
    dump = Dump(folder)
    shown = dump.ranks[0] if rank is None else rank
    compiles = dump.compiles(shown) or [dump.compile(shown, 1)]
    others = [other for other in dump.ranks if other != shown]
    units = dump.units(shown)
    runs = runs_of(units)
    parts = [_describe(record, runs.get(record.compile, ())) for record in compiles]
    if others:
        parts.append(f"ranks {', '.join(map(str, others))} as well (--rank; `dsgraph ranks {folder}` compares them)")
    data = {"ranks": dump.ranks, "units": to_json(units), "compiles": [to_json(record) for record in compiles]}
    return Answer("\n\n".join(parts), data)


def _describe(record: CompileRecord, modules: Sequence[str]) -> str:
    planned = sum(item.is_planned for item in record.parameters)
    axes = ", ".join(f"{axis.name}={axis.size} ({axis.backend})" for axis in record.axes) or "no shards"
    parameters = (
        f"{len(record.parameters)} parameters{f' ({planned} gathered by the graph of the step)' * bool(planned)}"
    )
    head = (
        f"rank {record.rank} of {record.world}, compile {record.compile}: {record.function}{runs_text(modules)}\n"
        f"{axes}, {parameters}, codegen {record.codegen}, torch {record.torch}, {record.time}"
    )
    remarks = [f"{step.graph} {note}" for step in record.steps for note in step.notes if note.startswith("refused: ")]
    return "\n".join([f"{head}\n{table(_rows(record), _HEADERS, right=range(1, 8))}", *remarks])


def _rows(record: CompileRecord) -> list[list[str]]:
    rows = []
    for step in record.steps:
        is_before = not step.pass_name
        rows.append(
            [
                step.graph,
                "" if is_before else str(step.changed),
                str(step.nodes),
                str(step.collectives),
                bytes_text(step.sent) if step.sent else "",
                "" if step.peak is None else bytes_text(step.peak),
                "" if is_before else f"{1000 * step.seconds:.1f}",
                "" if is_before else f"{1000 * step.verify_seconds:.1f}",
            ]
        )
    return rows


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dump_argument(parser)
    parser.add_argument("--rank", type=int, help="the rank to list (default: the first rank in the dump)")


COMMAND = Command(
    name="ls",
    help="list compiles, phases and passes of a dump",
    description="List every compile of a rank with every graph: the number of changes by the pass, nodes, collectives, "
    "bytes that a rank sends per run of the graph, peak of live bytes, time of the pass and of its verification. "
    "Bytes and peak are predicted.",
    configure=_configure,
    run=lambda args: list_dump(args.dir, rank=args.rank),
)
