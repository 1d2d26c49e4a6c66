"""Splitting of a joint graph so that a step stays under `memory_limit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch.fx import GraphModule

from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.analysis.step_memory import StepMemory
from dsgraph.passes.compat import is_tangent
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.graph import placeholders
from dsgraph.passes.ir.save_plan import Choice, SavePlan

from .policies import TransferPolicy
from .scratch import copy_graph, on_scratch, runnable, split_by_min_cut, without_duplicates
from .split_as_planned import split_as_planned
from .step_plan import Planner, StepPlan

PLANNED = "plan_activations"
"""The name of the plan in the report."""

_ROUNDS = 6

_UNSEEN = 4096
"""Bytes of a step that are not simulated, such as an optimizer's step counts."""

_FUSED = 6
"""One part in this many of a limit stays free for Inductor, which fuses and reorders kernels after the plan."""

Pair = tuple[GraphModule, GraphModule]


class MemoryLimitError(PassError):
    """A memory limit under which no plan keeps a step.

    Attributes:
        least: Bytes of the smallest limit that a plan keeps.

    Fix: use at least the limit that the message names, a smaller micro-batch, a higher ZeRO stage, or more ranks.
    """

    least = 0


@dataclass(frozen=True)
class Proposal:
    """The plan of one rank. All ranks must use the same one: the places of gathers in the backward depend on it.

    Attributes:
        saved: Names of the values to save; None for the default split.
        repeated: Names of the values to recompute.
        seconds: Predicted time of recomputation.
        peak: The memory of a step on that rank, bytes.
        refusal: Why no plan fits; empty if one does.
        lines: The choices, part by part.
        offloaded: Names of the offloaded values.
        tier: Their tier, see `SavePlan.tiers`.
    """

    saved: tuple[str, ...] | None
    repeated: tuple[str, ...]
    seconds: float
    peak: int
    refusal: str = ""
    lines: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    tier: str = ""

    def save_plan(self, gm: GraphModule) -> SavePlan:
        """Return it as a plan for a graph; in the graph of another batch, some values may be missing."""
        names = {node.name for node in gm.graph.nodes}
        choices = {name: Choice.RECOMPUTE for name in self.repeated if name in names}
        choices |= {name: Choice.OFFLOAD for name in self.offloaded if name in names}
        choices |= {name: Choice.SAVE for name in self.saved or () if name in names}
        return SavePlan(choices, tiers=dict.fromkeys(self.offloaded, self.tier))


Agree = Callable[[Callable[[], Proposal]], Proposal]
"""A function that returns the plan of all ranks: the one agreed on before, or one of the ranks' proposals."""


def alone(propose: Callable[[], Proposal]) -> Proposal:
    """Return the plan of a rank without other ranks."""
    return propose()


def decide(proposals: Mapping[int, Proposal]) -> Proposal:
    """Return the proposal of the rank that has to recompute most, or the refusal of the one that needs most memory."""
    refusing = [found for _, found in sorted(proposals.items()) if found.refusal]
    if refusing:
        return max(refusing, key=lambda found: found.peak)
    return max((found for _, found in sorted(proposals.items())), key=_need)


def _need(found: Proposal) -> tuple[bool, float]:
    return found.saved is not None, found.seconds


def fit(
    gm: GraphModule,
    inputs: Sequence[object],
    *,
    split: Callable[..., Pair],
    limit: int,
    measure: Callable[[Pair], StepMemory],
    held: int = 0,
    costs: CostModel,
    fuses: bool,
    transfers: TransferPolicy | None = None,
    in_flight: int = 1,
    agree: Agree = alone,
    **how: Any,
) -> tuple[Pair, Proposal]:
    """Split a joint graph by default if a step fits, and otherwise by the fastest plan with which it does.

    The default split takes most of the time. It is left out if the values that it must save exceed the limit.

    A plan is based on a replay of the joint graph. Memory that the replay misses is known after the split: the next
    plan gets that much less.

    Args:
        gm: A joint graph after its passes; it is not changed.
        inputs: Its inputs.
        split: A function like torch's partitioners.
        limit: Bytes of a step.
        measure: Returns the memory of a step with these graphs.
        held: Bytes that exist during the complete step: parameters and optimizer state.
        costs: The cost model.
        fuses: See `PassContext`.
        transfers: How values may be offloaded; None if they may not.
        in_flight: See `StageNeeds`; `measure` counts them as well.
        agree: Asks the other ranks.
        how: Arguments of `split`.

    Returns:
        The forward and the backward, and their plan, with this rank's memory.

    Raises:
        MemoryLimitError: No plan fits.
    """
    options = {"costs": costs, "outputs": how["num_fwd_outputs"], "transfers": transfers, "in_flight": in_flight}
    what: dict[str, Any] = {"gm": gm, "inputs": inputs, "split": split, "how": how}
    search = _Search(limit=limit, measure=measure, held=held, options=options, fuses=fuses, **what)
    with on_scratch():
        agreed = agree(search.propose)
        if agreed.refusal:
            error = MemoryLimitError(agreed.refusal)
            error.least = least_limit(agreed.peak, fuses=fuses)
            raise error
        (forward, backward), memory = search.attempt(agreed)
        return (runnable(forward), runnable(backward)), replace(agreed, peak=memory.peak)


@dataclass(kw_only=True)
class _Search:
    """The search of one rank for its proposal."""

    gm: GraphModule
    inputs: Sequence[object]
    split: Callable[..., Pair]
    limit: int
    measure: Callable[[Pair], StepMemory]
    held: int
    options: dict[str, Any]  # of the planner
    fuses: bool
    how: dict[str, Any]
    _done: dict[object, tuple[Pair, StepMemory]] = field(default_factory=dict)

    @cached_property
    def merged(self) -> GraphModule:
        """The graph without duplicates, on which the plan is made: the split merges them."""
        return without_duplicates(self.gm)

    def attempt(self, proposal: Proposal) -> tuple[Pair, StepMemory]:
        """Return the graph, split by a proposal, and the memory of a step with it."""
        key = proposal.saved, proposal.repeated, proposal.offloaded
        if key not in self._done:
            pair = self._split(proposal)
            self._done[key] = pair, self.measure(pair)
        return self._done[key]

    def _split(self, proposal: Proposal) -> Pair:
        """Return the graph, split by a proposal; another partitioner than torch's also splits planned graphs."""
        if proposal.saved is not None and self._uses_torch:
            saved, outputs = frozenset((*proposal.saved, *proposal.offloaded)), self.how["num_fwd_outputs"]
            pair = split_as_planned(self.merged, saved=saved, repeated=frozenset(proposal.repeated), outputs=outputs)
            if pair is not None:
                for part in pair:
                    proposal.save_plan(part).write(part)
                return pair
        part = copy_graph(self.gm if proposal.saved is None else self.merged)
        proposal.save_plan(part).write(part)
        return self.split(part, self.inputs, **self.how)

    @property
    def _uses_torch(self) -> bool:
        return self.split is split_by_min_cut

    @cached_property
    def planner(self) -> Planner:
        """The planner of the merged graph."""
        return Planner(self.merged, fuses=self.fuses, **self.options)

    def propose(self) -> Proposal:
        """Return the fastest plan that meets the limit."""
        usable = _usable(self.limit, fuses=self.fuses)
        first = Proposal(None, (), 0.0, 0)
        peak: int | None = None
        if self._needs_a_plan(usable):
            plan = self.planner.plan(usable - self.held) or self.planner.plan(None)
            assert plan is not None, "it has choices"
            first, peak = self._proposal(plan), plan.peak
        pair, memory = self.attempt(first)
        if peak is None:
            if memory.peak <= usable:
                return replace(first, peak=memory.peak)
            peak = self.planner.peak({node.name for node in placeholders(pair[1]) if not is_tangent(node)})
        for found, planned in self._plans(usable - (memory.peak - peak), usable=usable):
            if planned.peak <= usable:
                return replace(found, peak=planned.peak)
            memory = min(memory, planned, key=lambda each: each.peak)
        refusal = _refusal(self.limit, memory, fuses=self.fuses)
        return Proposal(None, (), 0.0, memory.peak, refusal=refusal)

    def _needs_a_plan(self, usable: int) -> bool:
        """Return True if the default split certainly exceeds the limit."""
        if not self._uses_torch or simulate(self.gm, fused=self.fuses).peak + self.held <= usable:
            return False
        return self.planner.is_feasible and self.held + self.planner.least_saved_bytes() > usable

    def _plans(self, room: int, *, usable: int) -> Iterator[tuple[Proposal, StepMemory]]:
        """Yield the fastest plan, then smaller ones, each by the excess of the one before; at last the smallest.

        The reference is the need of the plan before, not its room: a plan may leave much of its room unused.
        """
        for _ in range(_ROUNDS):
            plan = self.planner.plan(room)
            if plan is None:
                break
            found = self._proposal(plan)
            _, memory = self.attempt(found)
            yield found, memory
            room = plan.needs - max(memory.peak - usable, 1)
        least = self.planner.plan(None)
        if least is not None:
            found = self._proposal(least)
            yield found, self.attempt(found)[1]

    def _proposal(self, plan: StepPlan) -> Proposal:
        saved, repeated, offloaded = self.planner.names(plan)
        lines = tuple(map(str, self.planner.lines(plan)))
        transfers: TransferPolicy | None = self.options["transfers"]
        tier = transfers.tier if transfers is not None else ""
        return Proposal(saved, repeated, plan.seconds, 0, lines=lines, offloaded=offloaded, tier=tier)


def _usable(limit: int, *, fuses: bool) -> int:
    """Return the bytes that a step may use in the simulation, to stay under a limit when it runs."""
    left = limit - _UNSEEN
    return left - left // _FUSED if fuses else left


def least_limit(peak: int, *, fuses: bool) -> int:
    """Return the smallest limit that a step with this simulated peak keeps."""
    return peak + _UNSEEN + (peak // (_FUSED - 1) if fuses else 0)


def _refusal(limit: int, memory: StepMemory, *, fuses: bool) -> str:
    """Return an error message with the limit that would suffice, and the parts of memory at the peak."""
    least, peak = least_limit(memory.peak, fuses=fuses), memory.at_peak
    held = ", ".join(f"{name} {size:,}" for name, size in peak.composition.items() if size)
    where = f"{peak.node} of {peak.name}" if peak.node else peak.name
    return (
        f"memory_limit is {limit:,} bytes, and a step takes {least:,} at least: at {where} there are "
        f"{held}; raise the limit, take a smaller micro-batch, a higher stage or more ranks"
    )


def describe(found: Proposal, limit: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the report on it: `done` and `notes` of a pass."""
    takes = f"a step takes {found.peak:,} bytes of {limit:,}"
    if found.saved is None:
        done: tuple[str, ...] = (takes,)
    else:
        costs = "recomputation and exposed transfers take" if found.offloaded else "recomputation takes"
        done = (f"{takes}; {costs} {1e3 * found.seconds:.3f} ms", *found.lines)
    over = "memory_limit is exceeded for this batch: the ranks keep the plan of the first batch"
    return done, (over,) if found.peak > limit else ()
