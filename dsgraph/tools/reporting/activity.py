"""Things that were not done as one would wish: graph breaks, recompiles, fallbacks, near misses, checkpoint regions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from dsgraph.compiler.frames import SourceLines, is_torchs
from dsgraph.partitioning.state import PartitionState
from dsgraph.passes.ir.user_source import OWN_FOLDER
from dsgraph.tools.dumping.units import spelled

from .compile_log import CompileEntry, CompileLog

# Pattern of a failed guard on a module's `PartitionedModule` -> what the caller did.
_IN_WORDS = (
    (r"\.accumulating == True", "outside dsgraph.accumulate: the last micro-batch, or a step of one"),
    (r"\.accumulating == False", "inside dsgraph.accumulate"),
    (r"\.gradients_stay_local == True", "a step without dsgraph.accumulate, after one with it"),
    (r"\.gradients_stay_local == False", "inside dsgraph.accumulate, where gradients are added up on each rank"),
    (r"\.(sum_for_graphs|leaf)\b", "no accumulated gradients: a step without dsgraph.accumulate, after one with it"),
)


def in_words(guard: str) -> str:
    """Return what changed between two calls, from the guard that failed.

    A guard of the user's own values is returned unchanged.
    """
    if "._dsgraph" not in guard:
        return guard
    return next((words for pattern, words in _IN_WORDS if re.search(pattern, guard)), guard)


@dataclass(frozen=True)
class Break:
    """A place where Dynamo had to end a graph. `place` is `file:line (function)`; `compiles` counts graphs."""

    place: str
    reason: str
    compiles: int


@dataclass(frozen=True)
class Recompile:
    """A function that was compiled again. `times` counts its compiles so far; `reason` says what had changed."""

    function: str
    times: int
    reason: str
    compile: int


@dataclass(frozen=True)
class Fallback:
    """Something that does not run as compiled code.

    Attributes:
        kind: "parameter read eagerly", "function runs uncompiled", "op without lowering", "caches off", "step left its
            graph", "block without a graph of its own" or "gradient reduced at once".
        what: The parameter, function, op, pass, model or block.
        count: How often: reads, or calls in the graphs.
        place: `file:line (function)`, or "" where there is none.
        reason: Torch's reason, or what it means.
    """

    kind: str
    what: str
    count: int
    place: str
    reason: str


@dataclass(frozen=True)
class PassNote:
    """A note of a pass: what it left alone and why. `count` is the number of times, over these `compiles`."""

    phase: str
    pass_name: str
    note: str
    count: int
    compiles: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A checkpoint region that was not honoured, or that Dynamo did not capture.

    Attributes:
        place: The user's line: of the value, or of the call of `checkpoint`.
        problem: What happened.
        saved_bytes: Bytes that are kept all the same; None where that does not apply.
    """

    place: str
    problem: str
    saved_bytes: int | None


def graph_breaks_of(records: Sequence[CompileEntry], log: CompileLog) -> tuple[Break, ...]:
    """Return the graph breaks, one entry a place: those that end a graph, and those with no graph before them."""
    counts: Counter[tuple[str, str]] = Counter()
    known: set[tuple[str, int | None]] = set()
    for record in records:
        ends_in = record.capture.ends_in
        if ends_in is not None:
            known.update(ends_in.lines)
            counts[str(ends_in.place), ends_in.reason] += 1
    for record in records:
        function, line = record.capture.function, record.capture.resumes_at
        if line is not None and (function.file, line) not in known:
            place = f"{function.file}:{line} ({function.function})"
            counts[place, log.restart_reason(function) or "torch gives no reason"] += 1
    return tuple(Break(place, reason, count) for (place, reason), count in counts.items())


def recompiles_of(records: Sequence[CompileEntry]) -> tuple[Recompile, ...]:
    """Compile of functions that had been compiled before."""
    return tuple(
        Recompile(
            function=str(record.capture.function),
            times=record.capture.times,
            reason=in_words(record.capture.recompile_reason) or "torch gives no reason",
            compile=record.number,
        )
        for record in records
        if record.capture.times > 1
    )


def fallbacks_of(
    model: nn.Module, states: Sequence[PartitionState], records: Sequence[CompileEntry], log: CompileLog
) -> tuple[Fallback, ...]:
    """Return everything that does not run as compiled code, or not from a cache."""
    found = [
        Fallback("parameter read eagerly", name, count, "", "outside any compiled graph")
        for name, count in _eager_reads(states).items()
    ]
    own, callers = _functions_of(model, records), {span for record in records for span in record.capture.running}
    given_up = (frame for frame in log.given_up() if not frame.function.file.startswith(OWN_FOLDER))
    frames = Counter(frame for frame in given_up if frame.concerns(own, callers))
    for frame, count in frames.items():
        found.append(
            Fallback("function runs uncompiled", frame.function.function, count, str(frame.place), frame.reason)
        )
    calls: Counter[tuple[str, str]] = Counter()
    for record in records:
        for op, count in record.unlowered:
            calls[op, str(record.capture.function)] += count
    for (op, place), count in calls.items():
        found.append(Fallback("op without lowering", op, count, place, "Inductor calls it without compiling it"))
    passes = Counter((name, str(record.capture.function)) for record in records for name in record.unidentified)
    for (name, place), count in passes.items():
        found.append(Fallback("caches off", name, count, place, "the code of this pass cannot be identified"))
    return (*found, *_outside_step(states))


def near_misses_of(records: Sequence[CompileEntry]) -> tuple[PassNote, ...]:
    """Return the notes of all passes."""
    said: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for record in records:
        for item in record.passes:
            for note in item.notes:
                said[item.phase.value, item.name, note].append(record.number)
    return tuple(PassNote(*key, len(numbers), tuple(dict.fromkeys(numbers))) for key, numbers in said.items())


def regions_of(records: Sequence[CompileEntry]) -> tuple[Region, ...]:
    """Return checkpoint regions that keep what they should recompute, and those that run eagerly around a graph."""
    found = []
    for record in records:
        for tag in record.ignored_tags:
            place = str(tag.place or record.capture.function)
            found.append(Region(place, f"{tag.name} is kept instead of recomputed", tag.saved_bytes))
        ends_in = record.capture.ends_in
        if ends_in is not None and ends_in.region is not None:
            problem = f"runs eagerly: Dynamo did not capture it, for the graph break at {ends_in.place}"
            found.append(Region(str(ends_in.region), problem, None))
        region = record.capture.region
        if region is not None:
            inside = record.capture.function.function
            found.append(Region(str(region), f"runs eagerly, around the graph of {inside}: not captured with it", None))
    return tuple(dict.fromkeys(found))


def _outside_step(states: Sequence[PartitionState]) -> Iterator[Fallback]:
    """Yield what the graph of a step leaves out."""
    for step, root in ((state.step, state.root) for state in states):
        for reason, count in Counter(step.left).items():
            yield Fallback("step left its graph", type(root).__name__, count, "", reason)
        ran = step.ran()
        idle = [block.name for block in step.blocks if block not in ran]
        if ran and idle:
            reason = (
                "in the last forward it was skipped, or in the graph of its caller, as in a checkpoint, in control "
                "flow, or with an argument that is an object"
            )
            yield Fallback("block without a graph of its own", spelled(idle), len(idle), "", reason)
        for name in sorted({entry.name for plan in step.plans for entry in plan.alone}):
            yield Fallback("gradient reduced at once", name, 1, "", "the parameter has a hook")


def _eager_reads(states: Sequence[PartitionState]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in states:
        for entry in state.parameters:
            count = entry.eager_reads
            if count:
                counts[entry.name] = count
    return counts


def _functions_of(model: nn.Module, records: Iterable[CompileEntry]) -> set[SourceLines]:
    """Return the model's own methods, and the functions of which its graphs are."""
    found = {span for record in records for span in record.capture.running[:1]}
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        for value in vars(kind).values():
            if isinstance(value, FunctionType) and not is_torchs(value.__code__.co_filename):
                found.add(SourceLines.of(value.__code__))
    return found
