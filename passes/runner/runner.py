"""Runs the passes of a phase: lints, removes dead code, recompiles, times, checks and dumps, so that no pass has to."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch.fx import GraphModule

from dsgraph.passes.analysis.analyses import Analyses
from dsgraph.passes.core.collective_order import describe_order
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pair import GraphPair
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.core.pipeline import Pipeline
from dsgraph.passes.errors import PassError
from dsgraph.passes.verify.pair import PairVerifier
from dsgraph.passes.verify.verifier import Verifier


@dataclass(frozen=True)
class PassRecord:
    """The effect of one pass on one graph.

    `verify_seconds` is the time of checking its result; for a phase's first pass, also of checking its input.
    """

    name: str
    phase: Phase
    changed: int = 0
    notes: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    verify_seconds: float = 0.0


class GraphSink(Protocol):
    """Receives each graph before and after each pass."""

    def write(self, gm: GraphModule, ctx: PassContext, *, number: int, record: PassRecord | None) -> None:
        """Store a copy of `gm` after the `number`-th pass of the phase; 0 and no record: before the first."""


@dataclass
class Runner:
    """A runner of one pipeline over the graphs of one compile, with a record of it.

    Attributes:
        pipeline: The passes.
        sink: Receives graphs for a dump; None for none.
        after_phase: Called with each graph after a phase, and its context; for a pair, with each of the two.
        records: The effects of the passes so far.
        orders: The order of collectives at the start of each phase, and after each pass that may have changed it.
        verify: True checks each graph after each pass, see `passes/verify/verifier.py`.
    """

    pipeline: Pipeline
    sink: GraphSink | None = None
    after_phase: Callable[[GraphModule, PassContext], None] | None = None
    records: list[PassRecord] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    verify: bool = True
    _verifier: Verifier = field(default_factory=Verifier)
    _pair_verifier: PairVerifier = field(init=False)
    _analyses: Analyses = field(default_factory=Analyses)

    def __post_init__(self) -> None:
        self._pair_verifier = PairVerifier(self._verifier)

    def run(self, gm: GraphModule | GraphPair, ctx: PassContext) -> None:
        """Run the passes of `ctx.phase` over a graph, or over both of a pair, in place.

        A pair is only checked if there are passes for it.

        Raises:
            PassError: A pass failed or broke an invariant; the message names it.
        """
        if isinstance(gm, GraphPair) and not self.pipeline.of(ctx.phase):
            return
        ctx = replace(ctx, analyses=self._analyses)
        self._dump(gm, ctx, 0, None)
        verify_seconds = self._verify(gm, None, ctx)
        self._note_order(gm, None, ctx)
        for number, item in enumerate(self.pipeline.of(ctx.phase), start=1):
            record = PassRecord(item.name, ctx.phase, nodes_before=_size(gm, ctx))
            try:
                record = self._run_one(item, gm, ctx, is_first=number == 1)
                verify_seconds += self._verify(gm, item, ctx)
            except PassError as error:  # the graph that one wants to see
                self._dump_refused(gm, ctx, number, replace(record, notes=(*record.notes, f"refused: {error}")))
                raise
            self._note_order(gm, item, ctx)
            self.records.append(replace(record, verify_seconds=verify_seconds))
            verify_seconds = 0.0
            self._dump(gm, ctx, number, self.records[-1])
        self._verifier.end()
        self._pair_verifier.end()
        for graph, facts in _parts(gm, ctx):
            graph.recompile()  # once: between passes nobody runs the graph, and its text takes as long as a pass
            if self.after_phase is not None:
                self.after_phase(graph, facts)

    def note(self, gm: GraphModule, ctx: PassContext, record: PassRecord) -> None:
        """Record a decision on a graph after the passes of its phase, such as the choice of its split."""
        self.records.append(record)
        self._dump(gm, ctx, len(self.pipeline.of(ctx.phase)) + 1, record)

    def end(self) -> None:
        """Release all graphs, after the last phase of a compile."""
        self._analyses.clear()

    def _run_one(self, item: GraphPass, gm: GraphModule | GraphPair, ctx: PassContext, *, is_first: bool) -> PassRecord:
        nodes_before = _size(gm, ctx)
        started = time.perf_counter()
        try:
            result = item.run(gm, ctx)
        except Exception as error:
            raise PassError(f"pass {item.name} ({ctx.phase.value} graph) failed: {_describe(error)}") from error
        if not isinstance(result, PassResult):
            raise PassError(f"pass {item.name} returned {result!r}; `run` returns a PassResult")
        for graph, facts in _parts(gm, ctx):
            if result.changed:
                self._analyses.drop(graph)
            if result.changed or (self.verify and (is_first or not self._analyses.knows(graph))):  # it may lie
                _tidy(item, graph, facts)
        seconds = time.perf_counter() - started
        return PassRecord(
            name=item.name,
            phase=ctx.phase,
            changed=result.changed,
            notes=result.notes,
            done=result.done,
            seconds=seconds,
            nodes_before=nodes_before,
            nodes_after=_size(gm, ctx),
        )

    def _verify(self, gm: GraphModule | GraphPair, item: GraphPass | None, ctx: PassContext) -> float:
        """Check a graph after a pass, or before the first one; return the seconds that it took."""
        started = time.perf_counter()
        verifier: Any = self._pair_verifier if isinstance(gm, GraphPair) else self._verifier
        if self.verify and item is None:
            verifier.begin(gm, ctx)
        elif self.verify and item is not None:
            verifier.check(gm, item, ctx)
        return time.perf_counter() - started

    def _note_order(self, gm: GraphModule | GraphPair, item: GraphPass | None, ctx: PassContext) -> None:
        if ctx.phase is Phase.CAPTURE:
            return
        for graph, facts in _parts(gm, ctx):
            if item is None:
                self.orders.append(f"the {facts.graph} graph as it came: {describe_order(graph, facts)}")
            elif item.reorders_collectives or item.changes_collectives or not self.verify:
                self.orders.append(f"the {facts.graph} graph after pass {item.name}: {describe_order(graph, facts)}")

    def _dump(self, gm: GraphModule | GraphPair, ctx: PassContext, number: int, record: PassRecord | None) -> None:
        if self.sink is not None:
            for graph, facts in _parts(gm, ctx):
                self.sink.write(graph, facts, number=number, record=record)

    def _dump_refused(self, gm: GraphModule | GraphPair, ctx: PassContext, number: int, record: PassRecord) -> None:
        with suppress(Exception):  # of a graph that a pass has left half done; what the pass did wrong matters more
            self._dump(gm, ctx, number, record)


def _parts(gm: GraphModule | GraphPair, ctx: PassContext) -> tuple[tuple[GraphModule, PassContext], ...]:
    """Return each graph with its facts."""
    return gm.parts(ctx) if isinstance(gm, GraphPair) else ((gm, ctx),)


def _size(gm: GraphModule | GraphPair, ctx: PassContext) -> int:
    return sum(len(graph.graph.nodes) for graph, _ in _parts(gm, ctx))


def _describe(error: Exception) -> str:
    """Describe an error and its place: Dynamo cuts off the traceback of a backend's exception."""
    if isinstance(error, PassError):
        return str(error)
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {innermost.filename}:{innermost.lineno})"


def _tidy(item: GraphPass, gm: GraphModule, ctx: PassContext) -> None:
    # A captured graph still holds in-place torch functions, which FX cannot tell from pure ones: there, a pass removes
    # what it made useless itself.
    try:
        if ctx.phase is Phase.CAPTURE:
            gm.graph.lint()
        else:  # lints first; only nodes without users are asked, because `is_impure` is slow
            gm.graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure())
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise PassError(f"pass {item.name} left a malformed {ctx.graph} graph: {first_line}") from error
