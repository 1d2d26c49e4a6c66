"""Splits a joint graph so that a step stays under `memory_limit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch.fx import GraphModule

from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.analysis.step_memory import StepMemory
from dsgraph.passes.compat import is_tangent
from dsgraph.passes.errors import PassError
from dsgraph.passes.ir.graph import placeholders
from dsgraph.passes.ir.save_plan import Choice, SavePlan

from .policies import TransferPolicy
from .scratch import copy_graph, on_scratch, runnable, without_duplicates
from .step_plan import Planner, StepPlan

PLANNED = "plan_activations"
"""By which name the report knows what was planned."""

_ROUNDS = 6

_UNSEEN = 4096
"""Bytes that a step holds besides what is simulated, such as an optimizer's counts of steps."""

_FUSED = 6
"""One part in this many of a limit stays free for Inductor, which fuses and reorders kernels after the plan."""

Pair = tuple[GraphModule, GraphModule]


class MemoryLimitError(PassError):
    """No plan keeps a step under its limit."""


@dataclass(frozen=True)
class Proposal:
    """What one rank would do. Ranks must do alike: where a gather stands in the backward hangs on what is repeated.

    Attributes:
        saved: Names of the values to save; None to split as always.
        repeated: Names of the values to compute again.
        seconds: What that takes, predicted.
        peak: The memory of a step on that rank, bytes.
        refusal: Why no plan will do; empty where one does.
        lines: What was chosen, part by part.
        offloaded: Names of the values that wait elsewhere.
        tier: Where they do, see `SavePlan.tiers`.
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
        """As a plan for a graph: of another batch's, some values may be missing."""
        names = {node.name for node in gm.graph.nodes}
        choices = {name: Choice.RECOMPUTE for name in self.repeated if name in names}
        choices |= {name: Choice.OFFLOAD for name in self.offloaded if name in names}
        choices |= {name: Choice.SAVE for name in self.saved or () if name in names}
        return SavePlan(choices, tiers=dict.fromkeys(self.offloaded, self.tier))


Agree = Callable[[Callable[[], Proposal]], Proposal]
"""Gives what the ranks do: what they agreed on for such graphs before, or else of what each would do one thing."""


def alone(propose: Callable[[], Proposal]) -> Proposal:
    """What a rank does that has no others to ask."""
    return propose()


def decide(proposals: Mapping[int, Proposal]) -> Proposal:
    """The proposal of the rank that has to compute most again, or the refusal of the one that needs most memory."""
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
    costs: CostModel,
    fuses: bool,
    transfers: TransferPolicy | None = None,
    agree: Agree = alone,
    **how: Any,
) -> tuple[Pair, Proposal]:
    """Splits a joint graph as always if a step fits then, and otherwise by the fastest plan with which it does.

    A plan goes by a replay of the joint graph. What it left out shows when the graph is split: then the next plan has
    so much less.

    Args:
        gm: A joint graph behind its passes; it stays as it is.
        inputs: Its inputs.
        split: As torch's partitioners.
        limit: Bytes of a step.
        measure: The memory of a step with these graphs.
        costs: How long computing takes.
        fuses: See `PassContext`.
        transfers: How values may be offloaded; None if they may not.
        agree: Asks the other ranks.
        how: For `split`.

    Returns:
        The forward and the backward, and what they are split by, with this rank's memory.

    Raises:
        MemoryLimitError: No plan does.
    """
    search = _Search(
        gm=gm,
        inputs=inputs,
        split=split,
        limit=limit,
        measure=measure,
        costs=costs,
        fuses=fuses,
        transfers=transfers,
        how=how,
    )
    with on_scratch():
        agreed = agree(search.propose)
        if agreed.refusal:
            raise MemoryLimitError(agreed.refusal)
        (forward, backward), memory = search.attempt(agreed)
        return (runnable(forward), runnable(backward)), replace(agreed, peak=memory.peak)


@dataclass(kw_only=True)
class _Search:
    """One rank's way to its proposal."""

    gm: GraphModule
    inputs: Sequence[object]
    split: Callable[..., Pair]
    limit: int
    measure: Callable[[Pair], StepMemory]
    costs: CostModel
    fuses: bool
    transfers: TransferPolicy | None
    how: dict[str, Any]
    _done: dict[object, tuple[Pair, StepMemory]] = field(default_factory=dict)

    @cached_property
    def merged(self) -> GraphModule:
        """The graph that is planned on. A plan for values of which there are two would not come true."""
        return without_duplicates(self.gm)

    def attempt(self, proposal: Proposal) -> tuple[Pair, StepMemory]:
        """The graph, split by a proposal, and the memory of a step with it."""
        key = proposal.saved, proposal.repeated, proposal.offloaded
        if key not in self._done:
            part = copy_graph(self.gm if proposal.saved is None else self.merged)
            proposal.save_plan(part).write(part)
            pair = self.split(part, self.inputs, **self.how)
            self._done[key] = pair, self.measure(pair)
        return self._done[key]

    def propose(self) -> Proposal:
        """The fastest plan that meets the limit."""
        as_always = Proposal(None, (), 0.0, 0)
        usual, memory = self.attempt(as_always)
        usable = _usable(self.limit, fuses=self.fuses)
        if memory.peak <= usable:
            return replace(as_always, peak=memory.peak)
        planner = Planner(
            self.merged, self.costs, outputs=self.how["num_fwd_outputs"], fuses=self.fuses, transfers=self.transfers
        )
        saved = {node.name for node in placeholders(usual[1]) if not is_tangent(node)}
        room = usable - (memory.peak - planner.peak(saved))
        for found, planned in self._plans(planner, room, usable=usable):
            if planned.peak <= usable:
                return replace(found, peak=planned.peak)
            memory = min(memory, planned, key=lambda each: each.peak)
        return replace(as_always, peak=memory.peak, refusal=_refusal(self.limit, memory, fuses=self.fuses))

    def _plans(self, planner: Planner, room: int, *, usable: int) -> Iterator[tuple[Proposal, StepMemory]]:
        """The fastest plan, then each so much smaller as the one before was over; at last the smallest.

        It is less than the plan before needs, not than the room that it had: a plan may leave much of its room.
        """
        for _ in range(_ROUNDS):
            plan = planner.plan(room)
            if plan is None:
                break
            found = self._proposal(planner, plan)
            _, memory = self.attempt(found)
            yield found, memory
            room = plan.needs - max(memory.peak - usable, 1)
        least = planner.plan(None)
        if least is not None:
            found = self._proposal(planner, least)
            yield found, self.attempt(found)[1]

    def _proposal(self, planner: Planner, plan: StepPlan) -> Proposal:
        saved, repeated, offloaded = planner.names(plan)
        lines = tuple(map(str, planner.lines(plan)))
        tier = self.transfers.tier if self.transfers is not None else ""
        return Proposal(saved, repeated, plan.seconds, 0, lines=lines, offloaded=offloaded, tier=tier)


def _usable(limit: int, *, fuses: bool) -> int:
    """How many bytes a step may take in the simulation, to stay under a limit when it runs."""
    left = limit - _UNSEEN
    return left - left // _FUSED if fuses else left


def _refusal(limit: int, memory: StepMemory, *, fuses: bool) -> str:
    """Says what would do, and what memory holds at the peak."""
    least = memory.peak + _UNSEEN
    if fuses:
        least += memory.peak // (_FUSED - 1)
    peak = memory.at_peak
    held = ", ".join(f"{name} {size:,}" for name, size in peak.composition.items() if size)
    where = f"{peak.node} of {peak.name}" if peak.node else peak.name
    return (
        f"memory_limit is {limit:,} bytes, and a step takes {least:,} at least: at {where} there are "
        f"{held}; raise the limit, take a smaller micro-batch, a higher stage or more ranks"
    )


def describe(found: Proposal, limit: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the report says of it: `done` and `notes` of a pass."""
    takes = f"a step takes {found.peak:,} bytes of {limit:,}"
    if found.saved is None:
        done: tuple[str, ...] = (takes,)
    else:
        away = ", and transfers that nothing hides," if found.offloaded else ""
        done = (f"{takes}; computing again{away} takes {1e3 * found.seconds:.3f} ms", *found.lines)
    over = "memory_limit is not kept for this batch: the ranks go on with what they agreed on for the first one"
    return done, (over,) if found.peak > limit else ()
