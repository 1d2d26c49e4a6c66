"""What a pass is: a frozen dataclass from graph and facts to graph."""

from __future__ import annotations

import hashlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from torch.fx import GraphModule

from .cost import CostModel
from .errors import PassError
from .mesh_axis import MeshAxis


class Phase(Enum):
    """Where a pass runs, in the order in which the phases follow each other."""

    CAPTURE = "capture"
    """The graph that Dynamo captured: torch functions, forward only."""
    JOINT = "joint"
    """ATen ops, forward and backward in one graph; the whole graph when nothing needs a gradient."""
    FORWARD = "forward"
    """The forward after partitioning; the whole graph when nothing needs a gradient."""
    BACKWARD = "backward"
    """The backward after partitioning."""

    def __lt__(self, other: Phase) -> bool:
        order = list(Phase)
        return order.index(self) < order.index(other)


@dataclass(frozen=True)
class ParamInfo:
    """What is known of a parameter that enters the graph.

    Attributes:
        name: Its name in the model, as far as the captured frame tells.
        shape: Full shape.
        shard_shape: Shape of this rank's rows. It belongs into torch's cache keys: torch itself (2.13) tells DTensors
            apart by their full shapes alone, and a warm start would hand one rank the graph of another.
        dtype: Master dtype.
        placement: "shard" (rows split over `group`) or "whole".
        requires_grad: False for a frozen parameter.
    """

    name: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    requires_grad: bool


@dataclass(frozen=True)
class PassContext:
    """The facts a pass may use besides the graph. Plain data, the same on every rank up to shard sizes.

    Attributes:
        phase: The phase of the graph at hand.
        axes: The mesh axes whose groups the graph may name.
        params: Placeholder name -> parameter, for the parameters that `partition` manages.
        gradients: Output number -> name of the parameter whose gradient it is, in joint and backward graphs.
        inference: True when no backward follows; for a captured graph, when it starts with gradients switched off.
        user_outputs: How many of a forward graph's outputs, which come first, are the model's: those behind them are
            saved for the backward. None when nothing is saved, or where it is not known.
        costs: How long computing and communicating takes; of the first rank's host, the same on every rank.
        memory_limit: How much of the device's memory a step may use, bytes; None when nothing is known of it.
        keep_bytes: How much of it may hold gathered parameters from the forward to the backward, bytes, the same on
            every rank; None when nothing is known of it.
        replicas: Placeholders of gathered copies of parameters that are on their way when the graph begins to run.
        fuses: Whether a code generator behind the passes fuses pointwise ops and reductions, as Inductor does.
    """

    phase: Phase
    axes: tuple[MeshAxis, ...] = ()
    params: Mapping[str, ParamInfo] = field(default_factory=lambda: MappingProxyType({}))
    gradients: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    inference: bool = False
    user_outputs: int | None = None
    costs: CostModel = field(default_factory=CostModel.default)
    memory_limit: int | None = None
    keep_bytes: int | None = None
    replicas: frozenset[str] = frozenset()
    fuses: bool = False

    def axis(self, group: str) -> MeshAxis:
        """The axis of a process group that a node names.

        Raises:
            PassError: The group is not one of the mesh's.
        """
        for axis in self.axes:
            if axis.group == group:
                return axis
        known = ", ".join(f"{axis.name}={axis.group!r}" for axis in self.axes) or "none"
        raise PassError(f"the graph names process group {group!r}, which is not in the mesh (known: {known})")


@dataclass(frozen=True)
class PassResult:
    """What a pass did.

    Attributes:
        changed: How many places it changed.
        notes: What it left alone and why, for the report.
        done: What it did, where a number does not say enough, for the report.
    """

    changed: int = 0
    notes: tuple[str, ...] = ()
    done: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphPass(ABC):
    """A rewrite of one phase's graph.

    Subclasses are frozen dataclasses: fields are options, the docstring shows the graph before and after, `run`
    rewrites. The runner lints, removes dead code, recompiles, times and checks; a pass does none of these.

    Attributes:
        phase: When it runs.
        requires: Facts that an earlier pass must have provided.
        provides: Facts that hold after it.
        conflicts: Facts after which it must not run.
        reorders_collectives: Whether it may change the order of collectives within a group.
        changes_collectives: Whether it may add, remove or change collectives and markers.
        keeps_gathers: Whether it may keep a gathered parameter for the backward, which would gather it again otherwise.
        needs_mesh: Whether it has nothing to do in a model that is not partitioned.
    """

    phase: ClassVar[Phase]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()
    reorders_collectives: ClassVar[bool] = False
    changes_collectives: ClassVar[bool] = False
    keeps_gathers: ClassVar[bool] = False
    needs_mesh: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The pass's name in reports and dumps: `MergeGathers` -> `merge_gathers`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        """Rewrites `gm.graph` in place."""

    def fingerprint(self) -> str | None:
        """Identifies code and options in torch's caches; None when the source cannot be read, and nothing is cached.

        It covers the file that defines the pass. A pass that lives in several files overrides this.
        """
        return source_fingerprint(type(self), repr(self))


@dataclass(frozen=True, repr=False, kw_only=True)
class FunctionPass(GraphPass):
    """A pass made of a function by `graph_pass`."""

    function: Callable[[GraphModule, PassContext], PassResult | int | None]
    phase: Phase  # type: ignore[misc]  # a field here, a class attribute in hand-written passes
    requires: frozenset[str] = frozenset()  # type: ignore[misc]
    provides: frozenset[str] = frozenset()  # type: ignore[misc]
    conflicts: frozenset[str] = frozenset()  # type: ignore[misc]
    reorders_collectives: bool = False  # type: ignore[misc]
    changes_collectives: bool = False  # type: ignore[misc]
    keeps_gathers: bool = False  # type: ignore[misc]

    @property
    def name(self) -> str:
        return self.function.__name__

    def __repr__(self) -> str:
        return f"graph_pass({self.function.__module__}.{self.function.__qualname__}, phase={self.phase.value})"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        result = self.function(gm, ctx)
        if isinstance(result, PassResult):
            return result
        if isinstance(result, int) and not isinstance(result, bool):
            return PassResult(changed=result)
        raise PassError(
            f"it returned {result!r}; a graph pass returns how many places it changed (an int) or a PassResult"
        )

    def fingerprint(self) -> str | None:
        cells = self.function.__closure__ or ()
        if cells:  # what a closure holds cannot be hashed reliably
            return None
        return source_fingerprint(self.function, repr((self, self.function.__defaults__)))


def graph_pass(
    *,
    phase: Phase | str,
    requires: frozenset[str] | set[str] = frozenset(),
    provides: frozenset[str] | set[str] = frozenset(),
    conflicts: frozenset[str] | set[str] = frozenset(),
    reorders_collectives: bool = False,
    changes_collectives: bool = False,
    keeps_gathers: bool = False,
) -> Callable[[Callable[[GraphModule, PassContext], PassResult | int | None]], GraphPass]:
    """Makes a pass of a function `(gm, ctx) -> int | PassResult`, the number of places it changed.

    Args:
        phase: A `Phase` or its name: "capture", "joint", "forward" or "backward".
        requires: See `GraphPass`.
        provides: See `GraphPass`.
        conflicts: See `GraphPass`.
        reorders_collectives: See `GraphPass`.
        changes_collectives: See `GraphPass`.
        keeps_gathers: See `GraphPass`.

    Raises:
        PassError: `phase` is not a phase.
    """
    known = [item.value for item in Phase]
    if not isinstance(phase, Phase) and phase not in known:
        raise PassError(f"graph_pass: phase is {phase!r}; it takes one of {', '.join(known)}")
    when = Phase(phase)

    def decorate(function: Callable[[GraphModule, PassContext], PassResult | int | None]) -> GraphPass:
        return FunctionPass(
            function=function,
            phase=when,
            requires=frozenset(requires),
            provides=frozenset(provides),
            conflicts=frozenset(conflicts),
            reorders_collectives=reorders_collectives,
            changes_collectives=changes_collectives,
            keeps_gathers=keeps_gathers,
        )

    return decorate


def source_fingerprint(code: Callable[..., object] | type, options: str) -> str | None:
    """Hash of the options and of the whole file that defines `code`, so that a changed helper counts as well."""
    try:
        path = inspect.getsourcefile(code)
        source = Path(path).read_text() if path and Path(path).is_file() else inspect.getsource(code)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(f"{source}\0{options}".encode()).hexdigest()
