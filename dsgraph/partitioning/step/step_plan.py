"""The plans of a model's steps: one for each kind of step, and which of them the next step will follow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsgraph.partitioning.parameter import ParameterState

from .step_program import Program, Run
from .step_record import Entries, Key, StepRecord

MOST_PLANS = 16
"""Number of plans that a model has; the one that was not followed for longest makes room for another."""

MOST_MADE = 64
"""Number of plans that are made at all; further kinds of steps gather where they read."""

AT_ONCE = 4
"""Number of kinds of steps of a compiled model that are planned when they come first; others when they come again."""


@dataclass(eq=False)
class StepPlan:
    """The programs of a kind of step.

    Attributes:
        record: The step.
        gradients: The parameters, by the numbers of their gradients.
        shards: Name of an input of the programs -> parameter whose shard it is.
        copies: The same for full parameters that were gathered before.
        kept: Name of a result of the forward -> parameter that it keeps for the backward.
        alone: Parameters with hooks on any rank, whose gradients each rank reduces at once.
        signature: See `StepRecord.signature`.
        forward: The program of the forward.
        backward: That of the backward; None if none followed.
        number: Number of the plan, the same on all ranks.
    """

    record: StepRecord
    gradients: Entries
    shards: Mapping[str, ParameterState]
    copies: Mapping[str, ParameterState]
    kept: Mapping[str, ParameterState]
    alone: frozenset[ParameterState]
    signature: Any
    forward: Program
    backward: Program | None
    number: int = 0

    @property
    def holds(self) -> set[ParameterState]:
        """The parameters that it keeps for the backward, besides those of the unit with which the backward begins."""
        last = () if self.backward is None else self.record.calls[self.backward.calls[0]].entries
        return set(self.kept.values()).difference(last)

    def run(self, program: Program, deliver: Callable[[ParameterState, Tensor], None], kept: Mapping[str, Any]) -> Run:
        """Return a run of a program.

        Args:
            program: One of the plan's.
            deliver: Takes each parameter and its reduced gradient.
            kept: Full parameters that were gathered before, by name.
        """
        with torch.no_grad():  # otherwise reading a shard's rows makes an autograd node
            values = [self.shards[name].rows if name in self.shards else kept.get(name) for name in program.inputs]
        steps = program.code(None, lambda number, value: deliver(self.gradients[number], value), *values)
        return Run(program, steps)


MakePlan = Callable[[StepRecord], StepPlan]


@dataclass(eq=False)
class StepPlans:
    """The plans of a model, which are the same on all ranks.

    Attributes:
        make: Makes a plan of a record; None if there is no compiler.
        known: The plans; what was followed last comes last.
        recorded: The record of the last step.
        at_once: Number of kinds of steps that are planned when they come first: none of uncompiled models, whose first
            step takes no longer than a plan.
        kind: Identity of the next forward, if the caller knows it, such as the layers that it drops. The forward only
            follows plans of the same kind.
    """

    make: MakePlan | None = None
    known: list[StepPlan] = field(default_factory=list)
    recorded: StepRecord = field(default_factory=StepRecord)
    at_once: int = 0
    kind: Hashable = None
    _made: int = 0
    _seen: set[int] = field(default_factory=set)
    _next: dict[int, int] = field(default_factory=dict)  # number of a plan -> number of the plan that followed it
    _last: int = 0

    def __iter__(self) -> Iterator[StepPlan]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def choose(self, key: Key, held: Collection[ParameterState]) -> StepPlan | None:
        """Return the plan of a step that begins with a call; None if there is none.

        If there are several, it is the one that followed the last step before, or the one that was followed last.

        Args:
            key: The call.
            held: See `StepRecord.held`.
        """
        known = [plan for plan in self.known if plan.record.kind == self.kind]
        found = [plan for plan in known if plan.record.calls[0].key == key and plan.record.held == set(held)]
        expected = self._next.get(self._last)
        return next((plan for plan in found if plan.number == expected), found[-1] if found else None)

    def note(self, plan: StepPlan) -> None:
        """Note that a step was that of a plan."""
        self._next[self._last] = self._last = plan.number
        if plan in self.known:
            self.known.remove(plan)
            self.known.append(plan)

    def plan_of(self, record: StepRecord) -> StepPlan | None:
        """Return the plan of a recorded step, a new one if its kind is to be planned. All ranks call it together."""
        if not record.calls:
            return None
        self.recorded, signature = record, record.signature
        found = next((plan for plan in self.known if plan.signature == signature), None)
        is_due = len(self._seen) < self.at_once or hash(signature) in self._seen
        if found is None and self.make is not None and is_due and self._made < MOST_MADE:
            found = self.make(record)
            self._made += 1
            found.number = self._made
            self.known = [*self.known[1 - MOST_PLANS :], found]
        self._seen.add(hash(signature))
        return found

    def drop(self) -> None:
        """Drop all plans, which were made for other blocks or for another amount of spare memory."""
        self.known, self._next, self._last, self._seen = [], {}, 0, set()
        self.recorded = StepRecord()


@dataclass(eq=False)
class Forward:
    """A forward of the model, which follows a plan, or is recorded.

    Attributes:
        plan: The plan that it began with.
        run: The run of the plan's forward; None if it has ended or was abandoned.
        follows: True if all calls so far are those of the plan.
        record: The record; None if it follows a plan.
        kept: Full parameters that stay for the backward, by name.
        number: Number of the next call.
        reads: Numbers of the calls of uncompiled code.
        is_used: True when a backward has begun.
        has_failed: True if a unit has raised an error.
        realised: The plan of all its calls, if it is known.
    """

    plan: StepPlan | None = None
    run: Run | None = None
    follows: bool = False
    record: StepRecord | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    number: int = 0
    reads: set[int] = field(default_factory=set)
    is_used: bool = False
    has_failed: bool = False
    realised: StepPlan | None = None
    _alive: weakref.ref[Any] | None = None

    def expects(self, key: Key) -> bool:
        """Return True for the call that comes next by the plan."""
        assert self.run is not None and self.plan is not None
        is_next = self.run.next_call == self.number and not self.is_over
        return is_next and self.plan.record.calls[self.number].key == key

    def goes_on(self, key: Key) -> bool:
        """Return True for a call after the end of the plan which is not the first one of another forward."""
        is_open = self.follows and self.run is None and not self.is_over and self._alive is not None
        return is_open and self.plan is not None and self.plan.record.calls[0].key != key

    def fail(self) -> None:
        """Note that a unit has raised an error. A recomputation raises one to stop early, which is no failure."""
        self.has_failed, self.record = True, None

    def note_trained(self, graph: Any) -> None:
        """Note an object that lives as long as a part of autograd's graph."""
        if self._alive is None or self._alive() is None:
            self._alive = weakref.ref(graph)

    @property
    def is_over(self) -> bool:
        """True if a backward has begun, or if none can follow because autograd's graph is gone or was not completed."""
        return self.is_used or self.has_failed or (self._alive is not None and self._alive() is None)
