"""The base class of passes: a frozen dataclass that maps a graph and facts to a graph."""

from __future__ import annotations

import hashlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dsgraph.passes.errors import PassError

from .capture_facts import CaptureFacts
from .context import PassContext, Phase


@dataclass(frozen=True)
class PassResult:
    """The result of a pass.

    Attributes:
        changed: Number of changed places.
        notes: Places that it left unchanged and why, for the report.
        done: Descriptions of its changes, if a number is not enough, for the report.
    """

    changed: int = 0
    notes: tuple[str, ...] = ()
    done: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphPass(ABC):
    """A rewrite of one phase's graph.

    Subclasses are frozen dataclasses: fields are options, the docstring shows the graph before and after, `run`
    rewrites. The runner lints, removes dead code, recompiles, times and checks; a pass does none of these. A pass of
    `Phase.PAIR` gets a `GraphPair` in place of a graph.

    Attributes:
        phase: The phase in which it runs.
        requires: Facts that an earlier pass must have provided.
        provides: Facts that hold after it.
        conflicts: Facts after which it must not run.
        reorders_collectives: True if it may change the order of collectives within a group.
        changes_collectives: True if it may add, remove or change collectives and markers.
        keeps_gathers: True if it may keep a gathered parameter for the backward, which would otherwise gather it again.
        graph: "unit" for a pass of computation, which runs on each captured graph; "step" for a pass of gathers and
            reductions, which runs on the graph of a step, and on a captured graph that has its own. The
            graph of a step has no phase "capture".
    """

    phase: ClassVar[Phase]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    conflicts: ClassVar[frozenset[str]] = frozenset()
    reorders_collectives: ClassVar[bool] = False
    changes_collectives: ClassVar[bool] = False
    keeps_gathers: ClassVar[bool] = False
    graph: ClassVar[str] = "unit"

    @property
    def name(self) -> str:
        """The pass's name in reports and dumps: `MergeGathers` -> `merge_gathers`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def run(self, gm: Any, ctx: PassContext) -> PassResult:
        """Rewrite `gm.graph` in place; for a `GraphPair`, both graphs."""

    def applies(self, facts: CaptureFacts) -> bool:
        """Return True if the pass has something to do in graphs with these facts; otherwise it is left out."""
        return facts.is_partitioned if self.graph == "step" else not facts.is_step

    def fingerprint(self) -> str | None:
        """Return an identifier of code and options for torch's caches.

        None if the source cannot be read: no caching then.

        It covers the file that defines the pass. A pass that lives in several files overrides this.
        """
        return source_fingerprint(type(self), repr(self))


@dataclass(frozen=True, repr=False, kw_only=True)
class FunctionPass(GraphPass):
    """A pass made of a function by `graph_pass`."""

    function: Callable[[Any, PassContext], PassResult | int | None]
    phase: Phase  # type: ignore[misc]  # a field here, a class attribute in hand-written passes
    requires: frozenset[str] = frozenset()  # type: ignore[misc]
    provides: frozenset[str] = frozenset()  # type: ignore[misc]
    conflicts: frozenset[str] = frozenset()  # type: ignore[misc]
    reorders_collectives: bool = False  # type: ignore[misc]
    changes_collectives: bool = False  # type: ignore[misc]
    keeps_gathers: bool = False  # type: ignore[misc]
    graph: str = "unit"  # type: ignore[misc]

    @property
    def name(self) -> str:
        return self.function.__name__

    def __repr__(self) -> str:
        return f"graph_pass({self.function.__module__}.{self.function.__qualname__}, phase={self.phase.value})"

    def run(self, gm: Any, ctx: PassContext) -> PassResult:
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
    graph: str = "unit",
) -> Callable[[Callable[[Any, PassContext], PassResult | int | None]], GraphPass]:
    """Make a pass from a function `(gm, ctx) -> int | PassResult`; a number counts changed places.

    Args:
        phase: A `Phase` or its name: "capture", "joint", "pair", "forward" or "backward"; for "pair", `gm` is a
            `GraphPair`.
        requires: See `GraphPass`.
        provides: See `GraphPass`.
        conflicts: See `GraphPass`.
        reorders_collectives: See `GraphPass`.
        changes_collectives: See `GraphPass`.
        keeps_gathers: See `GraphPass`.
        graph: See `GraphPass`.

    Raises:
        PassError: `phase` is not a phase, or `graph` is neither "unit" nor "step".
    """
    known = [item.value for item in Phase]
    if not isinstance(phase, Phase) and phase not in known:
        raise PassError(f"graph_pass: phase is {phase!r}; it takes one of {', '.join(known)}")
    if graph not in ("unit", "step"):
        raise PassError(f'graph_pass: graph is {graph!r}; it takes "unit" or "step"')
    when = Phase(phase)
    if graph == "step" and when is Phase.CAPTURE:
        raise PassError('graph_pass: the graph of a step has no phase "capture": take graph="unit"')

    def decorate(function: Callable[[Any, PassContext], PassResult | int | None]) -> GraphPass:
        return FunctionPass(
            function=function,
            phase=when,
            requires=frozenset(requires),
            provides=frozenset(provides),
            conflicts=frozenset(conflicts),
            reorders_collectives=reorders_collectives,
            changes_collectives=changes_collectives,
            keeps_gathers=keeps_gathers,
            graph=graph,
        )

    return decorate


def source_fingerprint(code: Callable[..., object] | type, options: str) -> str | None:
    """Return a hash of the options and of the complete file that defines `code`, so that helpers count as well."""
    try:
        path = inspect.getsourcefile(code)
        source = Path(path).read_text() if path and Path(path).is_file() else inspect.getsource(code)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(f"{source}\0{options}".encode()).hexdigest()
