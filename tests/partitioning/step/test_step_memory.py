"""The full parameters that are alive in a step, and the collectives of one, on ranks of which only the first exists."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.testing import FileCheck
from torch.utils._python_dispatch import TorchDispatchMode

from .stacks import WIDTH, Stack, partitioned

pytestmark = pytest.mark.usefixtures("fake_ranks")

X = torch.ones(2, WIDTH)
WEIGHT = 4 * WIDTH * WIDTH


_OTHERS: dict[int, Tensor] = {}
"""Storage -> a tensor that tests before have left."""


@pytest.fixture(autouse=True)
def _leave_others_out() -> Iterator[None]:
    _OTHERS.update((item.untyped_storage()._cdata, item) for item in _large())
    yield
    _OTHERS.clear()


def _large() -> list[Tensor]:
    """Return the tensors in memory that are at least as large as a full weight."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    large = [item for item in tensors if item.untyped_storage().nbytes() >= WEIGHT]
    return [item for item in large if item.untyped_storage()._cdata not in _OTHERS]


def _alive() -> list[int]:
    """Return the sizes of their storages."""
    storages = [item.untyped_storage() for item in _large()]
    return list({storage._cdata: storage.nbytes() for storage in storages}.values())


class _Collectives(TorchDispatchMode):
    """Counts the tensors that collectives are given. In a forward it would switch compiled code off.

    Attributes:
        count: Name of a collective -> number of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = {"all_gather": 0, "reduce_scatter": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[0] if isinstance(args[0], list) else [args[0]]
        for name in () if isinstance(given[0], FakeTensor) else self.count:  # those of a plan in the making
            if "c10d" in str(func) and name in str(func).replace("allgather", "all_gather"):
                self.count[name] += len(given)
        return func(*args, **(kwargs or {}))


def test_only_what_the_plan_keeps_is_alive_between_forward_and_backward():
    model, steps = partitioned(Stack())
    between, after = [], []
    for _ in range(3):
        loss = model(X).sum()
        between.append(_alive())
        loss.backward()
        del loss
        after.append(_alive())
    (plan,) = steps.plans
    assert {entry.name for entry in plan.kept.values()} == {"blocks.3.linear.weight", "blocks.3.linear.bias"}
    assert between == [[], [WEIGHT], [WEIGHT]] and after == [[]] * 3


@pytest.mark.skipif(not hasattr(torch.autograd.Function, "boxed_grads_call"), reason="torch holds all gradients")
def test_a_gradient_is_freed_when_it_is_reduced(monkeypatch):
    model, steps = partitioned(Stack())
    model(X).sum().backward()
    (plan,), alive = steps.plans, []
    monkeypatch.setattr(steps, "_deliver", lambda *_: alive.append(_alive()))
    model(X).sum().backward()
    assert alive == [[]] * len(plan.gradients)


def test_a_forward_without_a_backward_leaves_nothing_alive():
    model, _ = partitioned(Stack())
    for _ in range(3):
        with torch.no_grad():
            model(X)
        assert _alive() == []
    for _ in range(2):
        model(X).sum().backward()
    model(X)
    model(X)
    assert _alive() == [WEIGHT], "what the last one keeps, whose backward may follow"


def test_blocks_that_a_forward_does_not_reach_are_gathered_for_the_other_ranks():
    model, steps = partitioned(Stack(), overlap_comm=False, gather_bucket_bytes=1)
    for _ in range(2):
        model(X).sum().backward()
    model._orig_mod.order = (0, 1)
    loss = model(X).sum()
    with _Collectives() as seen:
        loss.backward()
    assert steps.left == ["the backward began early"]
    assert seen.count == {"all_gather": 3 + 2 * 2, "reduce_scatter": 2 * 2}, "one was started when block 1 ended"


def test_a_backward_that_ends_early_reduces_zeros_for_the_other_ranks():
    model, steps = partitioned(Stack())
    for _ in range(2):
        model(X).sum().backward()
    model.zero_grad()
    loss = model(X).sum()
    with _Collectives() as seen:
        loss.backward(inputs=list(model._orig_mod.blocks[3].parameters()))
    assert seen.count == {"all_gather": 6, "reduce_scatter": 8} and len(steps.left) == 1
    assert [name for name, param in model.named_parameters() if param.grad is not None] == [
        f"_orig_mod.blocks.3.linear.{name}" for name in ("weight", "bias")
    ]


def test_gradients_of_a_backward_that_failed_come_no_more():
    model, steps = partitioned(Stack())
    for _ in range(2):
        model(X).sum().backward()
    model._orig_mod.order = (0, -2, 1, 2, 3)
    with pytest.raises(ValueError, match="in the backward"):
        model(X).sum().backward()
    model.zero_grad()
    with _Collectives() as seen:
        steps.settle()
    assert steps.left == ["the backward did not end"]
    assert seen.count == {"all_gather": 0, "reduce_scatter": 8}, "the other ranks may have come to their end"
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("overlap_comm", (True, False))
def test_the_option_overlap_comm_holds_for_the_plan(overlap_comm):
    model, steps = partitioned(Stack(), overlap_comm=overlap_comm)
    model(X).sum().backward()
    assert steps.gathers_ahead is overlap_comm
    (plan,) = steps.plans
    order = ("all_gather", "yield (3,") if overlap_comm else ("yield (3,", "all_gather")
    FileCheck().check(order[0]).check(order[1]).check("yield (2,").run(plan.backward.text)


def _hold(model: Any, steps: Any) -> None:
    """Run the first micro-batches of a step for which memory is left."""
    steps.note_spare(10**6)
    for _ in range(2):
        steps.in_step = True
        model(X).sum().backward()
    assert _alive() == [WEIGHT] * 3


def test_micro_batches_of_a_step_gather_once_what_fits():
    model, steps = partitioned(Stack())
    _hold(model, steps)
    model(X).sum().backward()  # the plan of a step with held copies follows its record
    _, plan = steps.plans
    last = {"blocks.3.linear.weight", "blocks.3.linear.bias"}
    assert {plan.shards[name].name for name in plan.forward.inputs if name in plan.shards} == last
    assert not [name for name in plan.backward.inputs if name in plan.shards]
    alone = steps.gathered_alone
    model(X).sum().backward()
    assert steps.gathered_alone == alone and len(steps.plans) == 2 and _alive() == [WEIGHT] * 3
    steps.in_step = False
    model(X).sum().backward()
    assert _alive() == [] and not steps.left


@pytest.mark.parametrize("fused", (True, False))
def test_an_update_ends_what_micro_batches_hold(fused):
    model, steps = partitioned(Stack())
    _hold(model, steps)
    held = [weakref.ref(tensor) for tensor in _large()]
    weight = model._orig_mod.blocks[1].linear._parameters["weight"]
    if fused:
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], fused=True).step()
    else:
        with torch.no_grad():
            weight.mul_(0.5)
    model(X)
    gc.collect()
    assert len(held) >= 3 and not any(reference() is not None for reference in held)


def test_gradients_are_sent_before_the_next_unit_where_parameters_are_kept():
    compiled, steps = partitioned(Stack(), memory_limit=10**9, reduce_bucket_bytes=1)
    compiled(X).square().sum().backward()
    (plan,) = steps.plans
    assert plan.holds and plan.backward is not None
    after_units = plan.backward.text.split("= yield (")[1:]
    assert len(after_units) == 4 and all("reduce_scatter" in part for part in after_units), plan.backward.text
