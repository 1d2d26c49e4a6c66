"""Reading a dump: from what a user types to records. Every error names the folder, file, graph or node."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dsgraph.tools.cli.command import CommandError
from dsgraph.tools.dumping.records import (
    COMPILE_FORMAT,
    GRAPH_FORMAT,
    NODES_BEGIN,
    VERSION,
    CompileRecord,
    GraphRecord,
    NodeRecord,
    StepRecord,
)
from dsgraph.tools.dumping.units import UnitRun, units_of
from dsgraph.utils.json_records import HeadRecord, RecordError, from_json_text
from dsgraph.utils.nearest import near

GRAPH_HELP = (
    "name of a graph in `dsgraph ls`, or a part of it that is unique: forward, joint-2, insert_zero_collectives "
    "(of several passes, the last). Add the prefix rank1/ or compile2/ for another rank or compile"
)

RecordT = TypeVar("RecordT", CompileRecord, GraphRecord)


@dataclass(frozen=True)
class GraphName:
    """The name of a graph in a dump."""

    rank: int
    compile: int
    graph: str

    def __str__(self) -> str:
        return f"rank{self.rank}/compile{self.compile}/{self.graph}"


class Dump:
    """A folder that `options={"dump": FOLDER}` has filled.

    Raises:
        CommandError: There is no such folder, or nothing in it that dsgraph has dumped.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            what = "is a file, not a folder" if self.folder.exists() else "does not exist"
            raise CommandError(f"{folder} {what}; `dsgraph run SCRIPT --dump {folder}` writes a dump there")
        self._places = _find_compiles(self.folder)
        if not self._places:
            raise CommandError(
                f"{folder} holds no dump of dsgraph (no rank*/compile*/compile.json){_inside_a_dump(self.folder)}"
            )
        self._compiles: dict[tuple[int, int], CompileRecord] = {}

    @property
    def ranks(self) -> list[int]:
        """The ranks that have written something."""
        return sorted({rank for rank, _ in self._places})

    def compiles(self, rank: int) -> list[CompileRecord]:
        """Return the compiles of a rank."""
        return [self.compile(rank, number) for other, number in sorted(self._places) if other == rank]

    def compile(self, rank: int, number: int) -> CompileRecord:
        """Return one compile."""
        key = (rank, number)
        if key not in self._places:
            known = ", ".join(f"rank{r}/compile{n}" for r, n in sorted(self._places))
            raise CommandError(f"{self.folder} has no rank{rank}/compile{number}; it has {known}")
        if key not in self._compiles:
            self._compiles[key] = _read(self._places[key] / "compile.json", COMPILE_FORMAT, CompileRecord)
        return self._compiles[key]

    def units(self, rank: int) -> tuple[UnitRun, ...]:
        """Return the units of a training step of a rank."""
        return units_of([record for record in self.compiles(rank) if record.in_step and not record.is_step])

    def find(self, text: str) -> GraphName:
        """Return the graph that a user means.

        Raises:
            CommandError: No graph is called so, or several are.
        """
        rank, compile_number, name = _take_apart(text, self.ranks[0])
        steps = self.compile(rank, compile_number).steps
        names = [step.graph for step in steps]
        if name in names:
            return GraphName(rank, compile_number, name)
        # `forward`, `joint-2` or the name of a pass; the last pass of a phase has what finally runs.
        matching = [step for step in steps if name in (step.phase, step.pass_name, f"{step.phase}-{step.number}")]
        if not matching:
            short = [
                word for step in steps for word in (step.phase, f"{step.phase}-{step.number}", step.pass_name) if word
            ]
            raise CommandError(f"no graph {text!r} in {self.folder}{_nearest(name, dict.fromkeys([*names, *short]))}")
        phases = {step.phase for step in matching}
        if len(phases) > 1:
            choices = ", ".join(step.graph for step in matching)
            raise CommandError(f"{text!r} matches {choices}: name one of them")
        return GraphName(rank, compile_number, matching[-1].graph)

    def step(self, name: GraphName) -> StepRecord:
        """Return the line of a graph in its compile."""
        return next(step for step in self.compile(name.rank, name.compile).steps if step.graph == name.graph)

    def read(self, name: GraphName) -> GraphRecord:
        """Return a graph.

        Raises:
            CommandError: Its file is missing, damaged or was left out.
        """
        step = self.step(name)
        if step.left_out:
            raise CommandError(f"{name} was not dumped: {step.left_out}")
        place = self._places[name.rank, name.compile]
        record = _read(place / f"{step.same_as or step.graph}.json", GRAPH_FORMAT, GraphRecord)
        return record

    def has_same_nodes(self, first: GraphName, other: GraphName) -> bool:
        """Return whether the files of two graphs list exactly the same nodes; False also when a file is missing."""
        texts = []
        for name in (first, other):
            step = self.step(name)
            try:
                text = (self._places[name.rank, name.compile] / f"{step.same_as or step.graph}.json").read_bytes()
            except OSError:
                return False
            texts.append(text.partition(NODES_BEGIN.encode())[2])
        return texts[0] == texts[1] and texts[0].rstrip().endswith(b"]}")

    def graph(self, text: str) -> GraphRecord:
        """Return the graph that a user means, read."""
        return self.read(self.find(text))

    def last_graphs(self, rank: int, compile_number: int) -> dict[str, GraphName]:
        """Return phase -> the graph after its last pass."""
        steps = self.compile(rank, compile_number).steps
        return {step.phase: GraphName(rank, compile_number, step.graph) for step in steps}


def add_dump_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument DIR, the folder of a dump."""
    parser.add_argument("dir", metavar="DIR", help="folder of a dump (DSGRAPH_DUMP or options={'dump': DIR})")


def add_graphs_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument GRAPH, one graph; the default is all graphs that finally run."""
    parser.add_argument(
        "graph",
        metavar="GRAPH",
        nargs="?",
        help=f"{GRAPH_HELP}; default: the final forward and backward graphs of every compile",
    )


def add_most_argument(parser: argparse.ArgumentParser, what: str, default: int) -> None:
    """Add the option --most, the largest number of lines to print."""
    parser.add_argument("--most", type=_count, default=default, metavar="N", help=f"{what} (default: {default})")


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines, 0 or more")
    return int(text)


def chosen_graphs(dump: Dump, text: str | None) -> list[GraphName]:
    """Return the graph that a user names, or all graphs of the first rank that run in the end."""
    if text is not None:
        return [dump.find(text)]
    names = []
    for record in dump.compiles(dump.ranks[0]):
        last = dump.last_graphs(record.rank, record.compile)
        names += [last[phase] for phase in ("forward", "backward") if phase in last]
    if not names:
        raise CommandError(f"no graph in {dump.folder} was compiled completely; name one that `dsgraph ls` lists")
    return names


def find_node(graph: GraphRecord, name: str) -> NodeRecord:
    """Return a node by its name, with or without the `%` of printed graphs.

    Raises:
        CommandError: There is none; offers the nearest.
    """
    wanted = name.removeprefix("%")
    for node in graph.nodes:
        if node.name == wanted:
            return node
    names = [node.name for node in graph.nodes]
    raise CommandError(f"no node {name!r} in {graph.graph}{_nearest(wanted, names)}")


def find_graph_of(dump: Dump, node: str) -> GraphName:
    """Return the last graph, of any pass and compile of the first rank, that has a node of this name.

    Raises:
        CommandError: None has.
    """
    wanted = node.removeprefix("%")
    names: set[str] = set()
    for record in reversed(dump.compiles(dump.ranks[0])):
        for step in reversed(record.steps):
            if step.same_as or step.left_out:
                continue
            name = GraphName(record.rank, record.compile, step.graph)
            nodes = {item.name for item in dump.read(name).nodes}
            if wanted in nodes:
                return name
            names |= nodes
    raise CommandError(f"no node {node!r} in {dump.folder}{_nearest(wanted, sorted(names))}")


def _find_compiles(folder: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for path in folder.glob("rank*/compile*/compile.json"):
        rank, number = path.parent.parent.name[len("rank") :], path.parent.name[len("compile") :]
        if rank.isdigit() and number.isdigit():
            found[int(rank), int(number)] = path.parent
    return found


def _inside_a_dump(folder: Path) -> str:
    """Return a hint for a user who named a folder inside a dump, or the dump of another tool."""
    if (folder / "compile.json").is_file():
        return f"; did you mean {folder.parent.parent}?"
    if next(folder.glob("compile*/compile.json"), None):
        return f"; did you mean {folder.parent}?"
    if any(folder.glob("**/fx_graph_readable.py")) or any(folder.glob("**/dedicated_log_torch_trace*")):
        return "; it looks like a trace of torch (TORCH_TRACE or TORCH_COMPILE_DEBUG)"
    return ""


def _take_apart(text: str, first_rank: int) -> tuple[int, int, str]:
    """Split a name: `rank1/compile2/joint` -> 1, 2, "joint"."""
    rank, number, names = first_rank, 1, []
    for part in text.split("/"):
        if match := re.fullmatch(r"rank(\d+)", part):
            rank = int(match[1])
        elif match := re.fullmatch(r"compile(\d+)", part):
            number = int(match[1])
        else:
            names.append(part)
    if len(names) != 1 or not re.fullmatch(r"[\w.-]+", names[0]) or ".." in names[0]:
        raise CommandError(f"{text!r} is not the name of a graph, such as joint-2 or rank1/compile1/forward")
    return rank, number, re.sub(r"\.(py|json)$", "", names[0])


def _nearest(found: str, known: Iterable[str]) -> str:
    known = list(known)
    close = near(found, known) or [name for name in known if found in name][:3]
    return f"; did you mean {' or '.join(close)}?" if close else f"; it has {', '.join(known[:8])}"


def _read(path: Path, form: str, kind: type[RecordT]) -> RecordT:
    try:
        text = path.read_bytes()
        head = from_json_text(HeadRecord, text)
    except FileNotFoundError:
        raise CommandError(f"{path} is missing: the dump is incomplete; write it again") from None
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except RecordError as error:
        raise CommandError(f"{path} is damaged, or dsgraph did not write it ({error}); write the dump again") from None
    if head.format != form:
        raise CommandError(
            f"{path} is of format {head.format!r}, not {form!r}: dsgraph did not write it, or it was moved"
        )
    if head.version > VERSION:
        raise CommandError(
            f"{path} is of version {head.version}, and this dsgraph reads up to {VERSION}: install a newer dsgraph"
        )
    try:
        return from_json_text(kind, text)
    except RecordError as error:
        raise CommandError(f"{path} is damaged ({error}); write the dump again") from None
