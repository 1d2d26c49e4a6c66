"""Ranks that leave the plan of a step: all together get right numbers, one alone is named on all ranks in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from dsgraph.partitioning.state import partition_states
from dsgraph.utils.errors import RanksDisagreeError

pytestmark = pytest.mark.distributed

_SECONDS = 30
"""Longest time until an error, far below the timeout of a collective."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Model(nn.Module):
    """A model of blocks; `at` is called with the number of a block before it runs, and says whether it does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.head = nn.Linear(16, 4)
        self.at: Callable[[int], bool] = lambda number: True

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if self.at(number):
                x = block(x)
        return self.head(x).square().mean()


def _skip(model: _Model) -> None:
    model.at = lambda number: number != 1


def _exit(model: _Model) -> None:
    model.at = lambda number: number < 2


def _raise(model: _Model) -> None:
    def at(number: int) -> bool:
        if number == 2:
            raise ValueError("in the forward")
        return True

    model.at = at


def _freeze(model: _Model) -> None:
    model.blocks[1].requires_grad_(False)


def _hook(model: _Model) -> None:
    model.blocks[1].up._parameters["weight"].register_hook(lambda grad: grad)


def _watch(model: _Model) -> None:
    model.blocks[2].down._parameters["bias"].register_post_accumulate_grad_hook(lambda param: None)


LEAVES = {"skip": _skip, "exit": _exit, "raise": _raise, "freeze": _freeze, "hook": _hook, "watch": _watch}


def _train(way: str, ranks: tuple[int, ...], *, stage: int, compiles: bool) -> list[Tensor]:
    """Return the gradients of steps of which the third leaves the plan on some ranks; it ends on the others as well."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dsgraph.partition(_Model(), stage=stage, keep_whole_below=0)
    run = torch.compile(model, backend="dsgraph", options={"codegen": "eager"}) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step in range(6):
        if step == 3 and dist.get_rank() in ranks:
            LEAVES[way](model)
        with suppress(ValueError):
            run(torch.full((2, 16), 1.0 + dist.get_rank())).backward()
        found += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
        model.at = lambda number: True
        optimizer.step()
        optimizer.zero_grad()
    assert partition_states(model)[0].step.plans.known, "there was a plan to leave"
    return found


def _all_leave(way: str, stage: int, compiles: bool) -> None:
    for mine, full in zip(_train(way, (0, 1), stage=stage, compiles=compiles), _plain(way), strict=True):
        theirs = full if stage < 1 else full.chunk(2)[dist.get_rank()]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def _plain(way: str) -> list[Tensor]:
    """Return the full gradients of the same steps, of a model that is not partitioned."""
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    for step in range(6):
        if step == 3:
            LEAVES[way](model)
        with suppress(ValueError):
            for rank in range(2):
                (model(torch.full((2, 16), 1.0 + rank)) / 2).backward()
        found += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        model.at = lambda number: True
        optimizer.step()
        optimizer.zero_grad()
    return found


def _one_leaves(way: str, stage: int, compiles: bool) -> str:
    started = time.monotonic()
    with pytest.raises(RanksDisagreeError) as caught:
        _train(way, (0,), stage=stage, compiles=compiles)
    assert time.monotonic() - started < _SECONDS
    return str(caught.value)


FORMS = [(3, True), (1, False), *(pytest.param(stage, False, marks=pytest.mark.full) for stage in (0, 2, 3))]


@pytest.mark.parametrize(("stage", "compiles"), FORMS)
@pytest.mark.parametrize("way", LEAVES)
def test_all_ranks_may_leave_a_plan(ranks, way, stage, compiles):
    ranks(2).run(_all_leave, way, stage, compiles)


@pytest.mark.parametrize(("stage", "compiles"), FORMS)
@pytest.mark.parametrize("way", LEAVES)
def test_a_rank_that_leaves_a_plan_alone_is_named(ranks, way, stage, compiles):
    for said in ranks(2).run(_one_leaves, way, stage, compiles):
        assert "rank 0" in said and "rank 1" in said


def _collectives(stage: int) -> int:
    """Return the number of operations with which a later step of an uncompiled model reduces its gradients."""
    torch.manual_seed(0)
    model = dsgraph.partition(_Model(), stage=stage, keep_whole_below=0)
    for _ in range(3):
        model(torch.ones(2, 16)).backward()
    with torch.profiler.profile() as seen:
        model(torch.ones(2, 16)).backward()
    names = ("all_reduce", "dsgraph::exchange_by_messages", "reduce_scatter")
    return sum(any(name in event.name for name in names) for event in seen.events())


@pytest.mark.parametrize("stage", range(4))
def test_gradients_of_an_uncompiled_model_are_reduced_together(ranks, stage):
    for count in ranks(2).run(_collectives, stage):
        assert 1 <= count <= 3, "of 18 gradients"
