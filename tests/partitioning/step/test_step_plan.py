"""Which steps are planned, and which plan a step follows."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

import dsgraph
from dsgraph.partitioning.state import partition_states
from dsgraph.partitioning.step.step_plan import AT_ONCE, MOST_PLANS, StepPlan, StepPlans
from dsgraph.partitioning.step.step_record import StepRecord, StepUnit

UNIT = StepUnit("unit")
KEY = ("first", True, False)


def _record(name: str, *, first: Any = KEY, held: frozenset[Any] = frozenset()) -> StepRecord:
    """Return the record of a step that differs from others after its first call."""
    record = StepRecord(held=held)
    record.begin(UNIT, first, (), ())
    record.begin(UNIT, (name, True, False), (), ())
    return record


def _make(record: StepRecord) -> StepPlan:
    program: Any = None
    return StepPlan(record, (), {}, {}, {}, frozenset(), record.signature, program, program)


def _plans(*names: str) -> tuple[StepPlans, list[StepPlan]]:
    plans = StepPlans(_make, at_once=AT_ONCE)
    made = [plans.plan_of(_record(name)) for name in names]
    assert None not in made
    return plans, made


def test_the_plan_that_followed_the_last_step_is_chosen():
    plans, (a, b, c) = _plans("a", "b", "c")
    for plan in (a, b, a, b, a):
        plans.note(plan)
    assert plans.choose(KEY, ()) is b
    plans.note(c)
    assert plans.choose(KEY, ()) is c
    plans.note(a)
    assert plans.choose(KEY, ()) is c, "which followed it when it came last"


def test_without_a_known_step_before_it_is_the_plan_that_was_followed_last():
    plans, (a, b) = _plans("a", "b")
    assert plans.choose(KEY, ()) is b
    plans.note(a)
    assert plans.choose(KEY, ()) is a and list(plans) == [b, a]


def test_a_plan_begins_with_the_call_and_the_held_copies_of_the_step():
    plans, (a,) = _plans("a")
    held = frozenset({"a parameter"})
    other, with_held = plans.plan_of(_record("a", first=("other",))), plans.plan_of(_record("a", held=held))
    plans.note(a)
    plans.note(a)
    assert plans.choose(("other",), ()) is other
    assert plans.choose(KEY, {"a parameter": 0}) is with_held
    assert plans.choose(("unknown",), ()) is None and plans.choose(KEY, {"another": 0}) is None


def test_equal_steps_have_one_plan():
    plans, (a, again) = _plans("a", "a")
    assert again is a and a.number == 1 and len(plans) == 1


def test_many_kinds_of_steps_are_planned_when_they_come_again():
    plans, made = _plans(*map(str, range(AT_ONCE)))
    assert plans.plan_of(_record("new")) is None
    again = plans.plan_of(_record("new"))
    assert again is not None and again.number == AT_ONCE + 1 and list(plans) == [*made, again]


def test_the_plan_that_was_not_followed_for_longest_makes_room():
    plans, (a, b, *_) = _plans(*map(str, range(AT_ONCE)))
    for name in map(str, range(AT_ONCE, MOST_PLANS)):
        plans.plan_of(_record(name))
        assert plans.plan_of(_record(name)) is not None
    plans.note(a)
    plans.plan_of(_record("more"))
    plans.plan_of(_record("more"))
    assert len(plans) == MOST_PLANS and a in plans and b not in plans
    plans.drop()
    assert not list(plans) and not plans.recorded.calls and plans.choose(KEY, ()) is None
    assert plans.plan_of(_record("a")).number == MOST_PLANS + 2, "ranks tell plans apart by their numbers"


def test_nothing_is_planned_of_a_step_without_calls_or_before_something_is_compiled():
    assert StepPlans(_make, at_once=AT_ONCE).plan_of(StepRecord()) is None
    plans = StepPlans(at_once=AT_ONCE)
    assert plans.plan_of(_record("a")) is None and plans.recorded.calls


def test_steps_of_uncompiled_models_are_planned_when_they_come_again(fake_ranks):
    model = dsgraph.partition(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=3, keep_whole_below=0)
    (state,) = partition_states(model)
    for count in (0, 1, 1):
        model(torch.ones(2, 8)).sum().backward()
        assert len(state.step.plans) == count
    assert state.step.left == []


def test_reductions_of_uncompiled_models_hold_at_most_8_mib(fake_ranks):
    layers = 16  # gradients of 1 MiB, reduced to an eighth of it
    model = dsgraph.partition(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers))), stage=3)
    for _ in range(2):
        model(torch.ones(2, 512)).sum().backward()
    (plan,) = partition_states(model)[0].step.plans
    running, most = 0, 0
    for call in re.findall(r"= torch.ops.\w+.(reduce_scatter\w*|wait_tensor)", plan.backward.text):
        running += 1 if call.startswith("reduce") else -1
        most = max(most, running)
    assert 1 < most * 9 / 8 <= 8
