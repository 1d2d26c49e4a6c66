"""The way to a plan under a limit, and what ranks agree on."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from dsgraph.passes.analysis.cost import CostModel
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.analysis.step_memory import PhaseMemory, StepMemory
from dsgraph.passes.ir.save_plan import Choice, must
from dsgraph.passes.memory import fit as module
from dsgraph.passes.memory.fit import MemoryLimitError, Proposal, decide, fit
from dsgraph.passes.memory.step_plan import StepPlan
from tests.passes.tracing import joint

AS_ALWAYS = 1000
"""Bytes of a step where nothing is computed again."""


def test_a_refusal_is_that_of_the_rank_that_needs_most():
    found = decide({0: Proposal(None, (), 0.0, 100, refusal="100 at least"), 1: Proposal(None, (), 0.0, 200, "200")})
    assert found.refusal == "200"


def test_a_plan_is_that_of_the_rank_that_computes_most_again():
    found = decide(
        {0: Proposal(("a",), ("b",), 2.0, 10), 1: Proposal(None, (), 0.0, 20), 2: Proposal(("a",), (), 1.0, 30)}
    )
    assert (found.saved, found.seconds) == (("a",), 2.0)


@dataclass
class _Planner:
    """Knows a few plans, by what they need and take, and gives the fastest in a room.

    Attributes:
        plans: What each needs by the replay -> the seconds that it takes.
        rooms: What was asked for.
    """

    plans: dict[int, float]
    rooms: list[int | None] = field(default_factory=list)

    def plan(self, room: int | None) -> StepPlan | None:
        self.rooms.append(room)
        fitting = [size for size in self.plans if room is None or size <= room]
        if not fitting:
            return None
        size = min(fitting) if room is None else min(fitting, key=self.plans.__getitem__)
        return StepPlan((size,), self.plans[size], size, size, *[frozenset[Node]()] * 3)

    def peak(self, saved: object) -> int:
        return AS_ALWAYS

    def names(self, plan: StepPlan) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        return (_name(plan.needs),), (), ()

    def lines(self, plan: StepPlan) -> tuple[str, ...]:
        return ()


def _name(size: int) -> str:
    return f"saved_{size}"


def _fit(planner: _Planner, peaks: dict[int, int], *, limit: int, monkeypatch: pytest.MonkeyPatch) -> Proposal:
    """Fits a graph into `limit` bytes; `peaks`: what a plan needs by the replay -> the peak when the graph is split."""

    def plans_on(gm: GraphModule, *args: object, **how: object) -> _Planner:
        assert [node.name for node in gm.graph.nodes if node.op == "call_function"] == list(map(_name, peaks))
        return planner

    monkeypatch.setattr(module, "Planner", plans_on)
    graph = Graph()
    x = graph.placeholder("x")
    for size in peaks:
        x = graph.create_node("call_function", abs, (x,), name=_name(size))
    again = graph.create_node("call_function", abs, x.args, name="again")  # torch computes it once
    graph.output((x, again))

    def measure(pair: tuple[GraphModule, GraphModule]) -> StepMemory:
        assert not gc.isenabled()
        saved = {node.name for node in pair[0].graph.nodes if must(node, Choice.SAVE)}
        (peak,) = [peak for size, peak in peaks.items() if _name(size) in saved] or [AS_ALWAYS]
        return StepMemory((PhaseMemory("forward 0", "abs", {"other": peak}),))

    pair, found = fit(
        GraphModule({}, graph),
        [],
        split=lambda gm, inputs, **how: (gm, gm),
        limit=limit + 4096,  # which a step holds besides what is simulated
        measure=measure,
        costs=CostModel.default((), device_type="cpu"),
        fuses=False,
        num_fwd_outputs=1,
    )
    assert all(type(part).__bases__ == (GraphModule,) and part(-3) == (3, 3) for part in pair)
    return found


def test_a_plan_that_leaves_much_of_its_room_and_is_too_large_gives_way_to_the_next(monkeypatch):
    planner = _Planner({60: 1.0, 50: 2.0, 10: 9.0})
    found = _fit(planner, {60: 107, 50: 97, 10: 57}, limit=100, monkeypatch=monkeypatch)
    assert (found.saved, found.seconds, found.peak) == ((_name(50),), 2.0, 97)
    assert planner.rooms == [100, 53]
    assert gc.isenabled()


def test_where_nothing_fits_the_smallest_plan_is_tried_at_once_and_no_other(monkeypatch):
    planner = _Planner({60: 1.0})
    with pytest.raises(MemoryLimitError, match="takes 4,203 at least"):
        _fit(planner, {60: 107}, limit=100, monkeypatch=monkeypatch)
    assert planner.rooms == [100, 53, None]
    assert gc.isenabled()


def test_the_search_ends(monkeypatch):
    planner = _Planner({size: 1 / size for size in range(1, 99)})
    with pytest.raises(MemoryLimitError):
        _fit(planner, dict.fromkeys(range(1, 99), 101), limit=100, monkeypatch=monkeypatch)
    assert len(planner.rooms) < 10 and planner.rooms[-1] is None


def test_the_default_split_is_left_out_where_it_cannot_fit(monkeypatch):
    def split(gm: GraphModule, inputs: object, **how: object) -> tuple[GraphModule, GraphModule]:
        raise AssertionError("the graph was split by default")

    def measure(pair: tuple[GraphModule, GraphModule]) -> StepMemory:
        return StepMemory((PhaseMemory("forward 0", "", {"other": simulate(pair[0]).peak}),))

    monkeypatch.setattr(module, "split_by_min_cut", split)
    gm = joint(lambda x: torch.mm(x, x).sin().sum(), torch.randn(4, 4))
    how = {"measure": measure, "costs": CostModel.default(), "fuses": False, "num_fwd_outputs": 1}
    with pytest.raises(AssertionError, match="split by default"):
        fit(gm, [], split=split, limit=8192, **how)
    _, found = fit(gm, [], split=split, limit=8192, held=8192, **how)
    assert found.saved is not None
