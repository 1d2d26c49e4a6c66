"""A compile: what is asked for, who compiles it, who watches, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsgraph.passes import CaptureFacts, PassContext, PassRecord, Pipeline
from dsgraph.passes.ir.user_source import short_path
from dsgraph.passes.regions.captured_regions import CapturedRegions
from dsgraph.ranks.agreement import Agreement

from .costs.agreed import DEFAULTS
from .frames import Capture
from .options import BackendOptions
from .runs import Communication


@dataclass(frozen=True)
class CompileRequest:
    """One captured graph, and all that is known of it before it is compiled.

    Attributes:
        number: Which compile of this process it is, from 1.
        options: The user's.
        pipeline: The passes that compile the graph.
        mode: One of Inductor's modes.
        capture: Where the graph comes from.
        module: The module that is being called; None where there is none.
        inputs: The graph's.
        facts: What passes may know.
        costs: Whether the costs that passes know are measured or defaults, in one line.
        agreement: Of the ranks over which the graph's parameters are partitioned; None where none are.
        lines: The passes that are to run, and what the graph communicates: the same on all those ranks.
        is_new: Whether the ranks have not compiled such a graph before, so that all of them compile it now.
        limit_gap: Why the memory limit cannot be promised for steps that run the graph; empty if it can, or if
            none was given.
        communication: Communication of the graph, which ranks compare at each run.
        regions: Functions that the graph calls for each of several blocks.
        sums: Which inputs are accumulated gradients that the graph's markers add.
        input_names: Dynamo's name of each input, derived from its source: "l_input_ids_".
    """

    number: int
    options: BackendOptions
    pipeline: Pipeline
    mode: str | None
    capture: Capture
    module: nn.Module | None
    inputs: Sequence[Any]
    facts: CaptureFacts
    costs: str = DEFAULTS
    agreement: Agreement | None = None
    lines: tuple[str, ...] = ()
    is_new: bool = True
    sums: tuple[int, ...] = ()
    input_names: tuple[str, ...] = ()
    limit_gap: str = ""
    communication: Communication = field(default_factory=Communication)
    regions: CapturedRegions = field(default_factory=CapturedRegions)

    @property
    def function(self) -> str:
        """The user's function, its file as short as it can be."""
        return str(replace(self.capture.function, file=short_path(self.capture.function.file)))

    @property
    def trains(self) -> bool:
        """Whether gradients are on and an input needs one."""
        return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in self.inputs)


@dataclass(frozen=True)
class CompileOutcome:
    """What came of a compile, besides what its graphs hold.

    Attributes:
        passes: What each pass did.
        from_cache: Whether AOTAutograd's cache had the graph, so that no pass after the capture ran.
        unidentified: Passes whose code cannot be identified, so that torch's caches were off.
        step_peak: Predicted bytes of a step that keeps a memory limit; None without one, and for a graph from a cache.
    """

    passes: tuple[PassRecord, ...] = ()
    from_cache: bool = False
    unidentified: tuple[str, ...] = ()
    step_peak: int | None = None


class GraphCompiler(Protocol):
    """Compiles the graph of one request."""

    @property
    def awaits_copies(self) -> bool:
        """Whether the compiled graph waits for the gathered copies that it reads; otherwise its caller must."""

    @property
    def may_hold_copies(self) -> bool:
        """Whether gathered copies of stage 3 may lie elsewhere in each step than in the one before."""

    @property
    def outcome(self) -> CompileOutcome:
        """What came of `compile`."""

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles `gm`, taken over; the result takes the inputs that `gm` takes."""


class CompilerChoice(Protocol):
    """One way to compile, chosen before anything is known of a graph."""

    def facts(self, facts: CaptureFacts, options: BackendOptions) -> CaptureFacts:
        """The facts as they are where the graph is to run."""

    def compiler(self, request: CompileRequest, watch: CompileWatch) -> GraphCompiler:
        """What compiles the graph of `request`, under the eyes of `watch` if passes see it as the program's own."""


class CompileWatch:
    """Sees one compile and changes nothing of it. What it does not override, it does not look at."""

    def write(self, gm: GraphModule, ctx: PassContext, *, number: int, record: PassRecord | None) -> None:
        """Sees each graph before and after each pass, see `GraphSink`."""

    def joint(self, gm: GraphModule) -> None:
        """Sees the joint graph before any pass."""

    def after_phase(self, gm: GraphModule, ctx: PassContext) -> None:
        """Sees each graph that has been through the passes of a phase."""

    def finished(self, outcome: CompileOutcome) -> None:
        """The graph was compiled."""


class CompileObserver(Protocol):
    """Sees all compiles of a backend."""

    def captured(self, capture: Capture, options: BackendOptions) -> None:
        """A graph was captured. Nothing was read off it yet, and no other rank was asked."""

    def begin(self, request: CompileRequest) -> CompileWatch:
        """The graph of `request` is about to be compiled."""


class Watches(CompileWatch):
    """Several that see the same compile."""

    def __init__(self, watches: Sequence[CompileWatch]) -> None:
        self._watches = watches

    def write(self, gm: GraphModule, ctx: PassContext, *, number: int, record: PassRecord | None) -> None:
        """Shows it to all."""
        for watch in self._watches:
            watch.write(gm, ctx, number=number, record=record)

    def joint(self, gm: GraphModule) -> None:
        """Shows it to all."""
        for watch in self._watches:
            watch.joint(gm)

    def after_phase(self, gm: GraphModule, ctx: PassContext) -> None:
        """Shows it to all."""
        for watch in self._watches:
            watch.after_phase(gm, ctx)

    def finished(self, outcome: CompileOutcome) -> None:
        """Tells all."""
        for watch in self._watches:
            watch.finished(outcome)
