"""A compile: the request, the compiler, the observers, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dsgraph.partitioning.blocks.unit import WHOLE_MODEL, Unit
from dsgraph.partitioning.step.step_record import Work
from dsgraph.passes import CaptureFacts, PassContext, PassRecord, Pipeline
from dsgraph.passes.ir.user_source import short_path
from dsgraph.ranks.agreement import Agreement

from .costs.agreed import DEFAULTS
from .frames import Capture
from .options import BackendOptions
from .runs import Communication


@dataclass(frozen=True)
class CompileRequest:
    """One captured graph, with everything that is known about it before it is compiled.

    Attributes:
        number: Number of the compile in this process, from 1.
        options: The user's.
        pipeline: The passes that compile the graph.
        mode: One of Inductor's modes.
        capture: The origin of the graph.
        module: The module that is being called; None where there is none.
        unit: The unit of a step that the graph is part of.
        inputs: The graph's.
        facts: The facts that passes may use.
        costs: One line that says if the costs that passes use are measured or defaults.
        agreement: Of the ranks over which the graph's parameters are partitioned; None where none are.
        lines: The passes that are to run, and what the graph communicates: the same on all those ranks.
        is_new: True if the ranks have not compiled such a graph before, so that all of them compile it now.
        limit_gap: Why the memory limit cannot be promised for steps that run the graph; empty if it can, or if
            none was given.
        reads_held: True for a step that reads full parameters which a micro-batch before has gathered.
        work: What the graph computes, if it is a unit of a step.
        communication: Communication of the graph, which ranks compare at each run.
        sums: Numbers of the inputs that are accumulated gradients which the graph's markers add.
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
    unit: Unit = WHOLE_MODEL
    reads_held: bool = False
    work: Work = field(default_factory=Work)
    communication: Communication = field(default_factory=Communication)

    @property
    def function(self) -> str:
        """The user's function, with a file name that is as short as possible."""
        return str(replace(self.capture.function, file=short_path(self.capture.function.file)))

    @property
    def trains(self) -> bool:
        """True if gradients are enabled and an input needs one."""
        return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in self.inputs)


@dataclass(frozen=True)
class CompileOutcome:
    """The outcome of a compile, besides its graphs.

    Attributes:
        passes: What each pass did.
        from_cache: True if AOTAutograd's cache had the graph, so that no pass after the capture ran.
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
        """True if the compiled graph waits for the gathered copies that it reads; otherwise its caller must."""

    @property
    def outcome(self) -> CompileOutcome:
        """The outcome of `compile`."""

    def compile(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile `gm`, which is consumed; the result takes the inputs that `gm` takes."""


class CompilerChoice(Protocol):
    """A way to compile, chosen before anything is known about a graph."""

    def facts(self, facts: CaptureFacts, options: BackendOptions) -> CaptureFacts:
        """Return the facts as they are where the graph will run."""

    def compiler(self, request: CompileRequest, watch: CompileWatch) -> GraphCompiler:
        """Return the compiler of the graph of `request`.

        `watch` sees the passes if they make the program's own graph.
        """


class CompileWatch:
    """An observer of one compile, which changes nothing. It ignores the events that it does not override."""

    def write(self, gm: GraphModule, ctx: PassContext, *, number: int, record: PassRecord | None) -> None:
        """Receive each graph before and after each pass, see `GraphSink`."""

    def joint(self, gm: GraphModule) -> None:
        """Receive the joint graph before any pass."""

    def after_phase(self, gm: GraphModule, ctx: PassContext) -> None:
        """Receive each graph that has been through the passes of a phase."""

    def finished(self, outcome: CompileOutcome) -> None:
        """Receive the outcome when the graph has been compiled."""


class CompileObserver(Protocol):
    """An observer of all compiles of a backend."""

    def captured(self, capture: Capture, options: BackendOptions) -> None:
        """Note that a graph was captured. Nothing was read off it yet, and no other rank was asked."""

    def begin(self, request: CompileRequest) -> CompileWatch:
        """Return the watch of a compile that is about to begin."""


class Watches(CompileWatch):
    """Several watches of the same compile."""

    def __init__(self, watches: Sequence[CompileWatch]) -> None:
        self._watches = watches

    def write(self, gm: GraphModule, ctx: PassContext, *, number: int, record: PassRecord | None) -> None:
        """Pass the graph to all watches."""
        for watch in self._watches:
            watch.write(gm, ctx, number=number, record=record)

    def joint(self, gm: GraphModule) -> None:
        """Pass the graph to all watches."""
        for watch in self._watches:
            watch.joint(gm)

    def after_phase(self, gm: GraphModule, ctx: PassContext) -> None:
        """Pass the graph to all watches."""
        for watch in self._watches:
            watch.after_phase(gm, ctx)

    def finished(self, outcome: CompileOutcome) -> None:
        """Pass the outcome to all watches."""
        for watch in self._watches:
            watch.finished(outcome)
