"""Records of a backend's compiles for the report: plain data, kept while the model exists."""

from __future__ import annotations

import itertools
import re
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dsgraph.compat.compiled import compile_metrics
from dsgraph.compiler.frames import Capture, SourceLine, SourceLines, first_sentences, guard_of, is_torchs
from dsgraph.partitioning.blocks.unit import Unit
from dsgraph.passes import PassRecord
from dsgraph.passes.analysis.budget import StageNeeds
from dsgraph.passes.analysis.pair_memory import PairMemory
from dsgraph.passes.ir.user_source import OWN_FOLDER

from .measure import Activations, IgnoredTag, LoweredGraph


@dataclass(frozen=True)
class CompileEntry:
    """One compile of one captured graph.

    Attributes:
        number: Which compile of this process it was.
        capture: Where the graph came from.
        module: id of the module that was being called; 0 where there was none.
        unit: The unit of a step that it is part of.
        parameters: The parameters that it reads: name in the called module -> name in the partitioned model, which is
            empty for others; see `GraphInput.model_name`.
        codegen: "inductor" or "eager".
        in_step: True if gradients were enabled, so that a training step runs it.
        is_step: True for the graph of a step, whose nodes are runs of other graphs.
        training: True if gradients were enabled and an input needed one.
        reduces: True if its backward reduces gradients of parameters, or leaves that to the graph of the step.
        reads_held: See `CompileRequest.reads_held`.
        from_cache: True if it came from AOTAutograd's cache, so that the passes after the capture did not run.
        unidentified: Passes whose code cannot be identified, so that torch's caches were off.
        passes: What each pass did.
        graphs: The lowered graphs; empty when they came from the cache.
        activations: What passes from forward to backward.
        memory: Of the two graphs; None without a backward.
        memory_limit: Bytes that a step may use; None without a limit.
        limit_gap: Why the limit cannot be promised; empty if it can, or if no limit was given.
        needs: What a step with a `memory_limit` needs besides one run of the graph, if several runs share it.
        held_gradients: Bytes of gradients of earlier micro-batches that exist during a backward.
        costs: One line that says if the costs that passes use are measured or defaults.
        ignored_tags: Where checkpoint regions were not honoured.
        unlowered: Op, calls: what Inductor runs as it is.
    """

    number: int
    capture: Capture
    module: int
    unit: Unit
    parameters: Mapping[str, str]
    codegen: str
    in_step: bool
    is_step: bool
    training: bool
    reduces: bool
    reads_held: bool
    from_cache: bool
    unidentified: tuple[str, ...]
    passes: tuple[PassRecord, ...]
    graphs: tuple[LoweredGraph, ...]
    activations: Activations | None
    memory: PairMemory | None
    memory_limit: int | None
    limit_gap: str
    needs: StageNeeds | None
    held_gradients: int
    costs: str
    ignored_tags: tuple[IgnoredTag, ...]
    unlowered: tuple[tuple[str, int], ...]

    @property
    def is_for_accumulation(self) -> bool:
        """True if a step without `accumulate` would have run another graph."""
        return self.reads_held or not self.reduces


@dataclass(frozen=True)
class GivenUp:
    """A frame that Dynamo runs uncompiled.

    Attributes:
        function: The function.
        place: Where in it compiling failed.
        reason: Torch's reason, its first sentences.
        callers: File and line of each of the user's frames on the way there.
    """

    function: SourceLine
    place: SourceLine
    reason: str
    callers: tuple[tuple[str, int], ...]

    def concerns(self, functions: Iterable[SourceLines], callers: Iterable[SourceLines] = ()) -> bool:
        """Return whether it is one of `functions` or was called by one, or is itself one of `callers`."""
        lines = [(self.function.file, self.function.line), *self.callers]
        if any(span.holds(file, line) for span in functions for file, line in lines):
            return True
        return any((span.file, span.first) == lines[0] for span in callers)


@dataclass
class _Entry:
    record: CompileEntry
    owners: list[weakref.ref[Any]] = field(default_factory=list)
    living: int = 0


class CompileLog:
    """The compiles of a backend, by the models that they belong to.

    A record belongs to the parameters among its graph's inputs and to the module that was being called. It goes with
    the last of them. A graph that has neither (between two graph breaks of a function) belongs where the other graphs
    of its function belong. Frames that Dynamo gave up on name no object: the last 256 are kept.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._ownerless: deque[CompileEntry] = deque(maxlen=32)
        self._given_up: deque[GivenUp] = deque(maxlen=256)
        self._restarts: deque[tuple[str, int, str]] = deque(maxlen=256)
        self._last_metric: Any = None
        self._last_frame = -1
        self._keys = itertools.count()

    def add(self, record: CompileEntry, owners: Sequence[object]) -> None:
        """Keep a record for as long as one of `owners` lives."""
        function = record.capture.function
        if not owners:
            owners = self._owners_of(function)
            if not owners:
                self._ownerless.append(record)
                return
        self._keep(record, owners)
        adopted = [waiting for waiting in self._ownerless if waiting.capture.function == function]
        for waiting in adopted:
            self._ownerless.remove(waiting)
            self._keep(waiting, owners)

    def of(self, objects: Iterable[object]) -> list[CompileEntry]:
        """Return the records that belong to one of `objects`, in the order of compiling."""
        wanted = {id(item) for item in objects}
        found = []
        for entry in list(self._entries.values()):  # an owner may die meanwhile
            living = (reference() for reference in entry.owners)
            if any(owner is not None and id(owner) in wanted for owner in living):
                found.append(entry.record)
        return sorted(found, key=lambda record: record.number)

    def __len__(self) -> int:
        return len(self._entries) + len(self._ownerless)

    def look(self) -> list[GivenUp]:
        """Record what Dynamo has noted since the last call; return the frames that it gave up on since then."""
        metrics = compile_metrics()
        new = metrics
        for number, metric in enumerate(metrics):
            if metric is self._last_metric:
                new = metrics[number + 1 :]
        if metrics:
            self._last_metric = metrics[-1]
        fresh = []
        for metric in new:
            if self._begins_anew(metric):
                self._given_up.clear()
            if metric.restart_reasons and metric.co_filename:
                reason = "; ".join(sorted(first_sentences(text) for text in metric.restart_reasons))
                self._restarts.append((metric.co_filename, metric.co_firstlineno or 0, reason))
            if _runs_uncompiled(metric):
                fresh.append(self._given_up_frame(metric))
                self._given_up.append(fresh[-1])
        return fresh

    def _begins_anew(self, metric: Any) -> bool:
        """Return True if Dynamo was reset before this compile, and so tries again to compile what it gave up on."""
        frame, _, again = str(metric.compile_id).partition("/")
        if metric.is_forward is False or again != "0" or not frame.isdecimal():
            return False
        earlier, self._last_frame = self._last_frame, int(frame)
        return self._last_frame <= earlier

    def given_up(self) -> list[GivenUp]:
        """Return the frames that Dynamo gave up on."""
        return list(self._given_up)

    def restart_reason(self, function: SourceLine) -> str:
        """Return why Dynamo last began anew with a function, which it does at a graph break.

        Empty when it is not known.
        """
        lines = {(function.file, function.line)}
        return next((why for file, line, why in reversed(self._restarts) if (file, line) in lines), "")

    def _keep(self, record: CompileEntry, owners: Iterable[object]) -> None:
        key, entry, log = next(self._keys), _Entry(record), weakref.ref(self)

        def release(_: object) -> None:
            living = log()
            if living is not None:
                living._release(key)

        entry.owners = [weakref.ref(owner, release) for owner in owners]
        entry.living = len(entry.owners)
        self._entries[key] = entry

    def _release(self, key: int) -> None:
        entry = self._entries[key]
        entry.living -= 1
        if entry.living == 0:
            del self._entries[key]

    def _owners_of(self, function: SourceLine) -> list[object]:
        for entry in reversed(list(self._entries.values())):
            if entry.record.capture.function == function:
                living = (reference() for reference in entry.owners)
                return [owner for owner in living if owner is not None]
        return []

    def _given_up_frame(self, metric: Any) -> GivenUp:
        reason = first_sentences(metric.fail_reason or "")
        function = SourceLine(metric.co_filename or "", metric.co_firstlineno or 0, metric.co_name or "")
        if not function.file:  # refused before the frame was looked at: its limit is reached
            function = self._function_compiled_as(str(metric.compile_id)) or SourceLine("<unknown>", 0)
            reason += f"; the last guard to fail was {guard_of(metric.recompile_reason or 'unknown')}"
        file, line = metric.fail_user_frame_filename, metric.fail_user_frame_lineno
        is_users = file and not file.startswith(OWN_FOLDER)
        stack = re.findall(r"Line: (\d+), Name: .+, Filename: (.+)", "\n".join(metric.stack_trace or ()))
        return GivenUp(
            function=function,
            place=SourceLine(file, line or 0, function.function) if is_users else function,
            reason=reason,
            callers=tuple((file, int(line)) for line, file in stack if not is_torchs(file)),
        )

    def _function_compiled_as(self, compile_id: str) -> SourceLine | None:
        frame = compile_id.partition("/")[0]
        for entry in reversed(list(self._entries.values())):
            if entry.record.capture.compile_id.partition("/")[0] == frame:
                return entry.record.capture.function
        return None


def owners_among(inputs: Iterable[object], module: nn.Module | None) -> list[object]:
    """Return a graph's owners: parameters, gathered copies and leaves among its inputs, and the called module."""
    found: list[object] = [
        value
        for value in inputs
        if isinstance(value, Tensor)
        and (isinstance(value, nn.Parameter) or hasattr(value, "dsgraph_partition") or hasattr(value, "dsgraph_leaf"))
    ]
    return found if module is None else [*found, module]


def _runs_uncompiled(metric: Any) -> bool:
    if not metric.fail_type or metric.is_forward is False:
        return False
    # Anything else was raised to the user, unless he asked torch to suppress it.
    return metric.fail_type in ("Unsupported", "UserError") or bool(metric.config_suppress_errors)
