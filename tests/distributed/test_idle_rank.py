"""A rank that has no gradient in some micro-batches, or in all of a step, leaves nobody waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsgraph
from tests.distributed.training import full

pytestmark = pytest.mark.distributed


def _step(stage: int, reduce_once: bool | None, codegen: str | None, runs_last: bool) -> None:
    """Two steps in which the second rank runs no backward inside `accumulate`, and outside if it `runs_last` alone."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = dsgraph.partition(torch.nn.Linear(3, 2), stage=stage, keep_whole_below=0)
    runs: Any = model
    if codegen is not None:
        runs = torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        with dsgraph.accumulate(model, reduce_once=reduce_once):
            loss = runs(torch.full((1, 3), 2.0)).sum()
            if rank == 0:
                loss.backward()
        loss = runs(torch.full((1, 3), float(4 + rank))).sum()
        if rank == 0 or runs_last:
            loss.backward()
        optimizer.step()
        expected = (2 + 4 + (5 if runs_last else 0)) / 2
        grad = full(dict(model.named_parameters())["weight"].grad)
        assert torch.equal(grad, torch.full((2, 3), expected))
        optimizer.zero_grad()


@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize(("stage", "reduce_once"), ((0, None), (1, None), (2, True)))
def test_a_rank_without_gradients_inside_accumulate(ranks, stage, reduce_once, codegen):
    ranks(2).run(_step, stage, reduce_once, codegen, True, timeout_s=30)


@pytest.mark.parametrize(("stage", "reduce_once"), ((0, None), (2, True)))
def test_a_rank_without_gradients_in_a_step(ranks, stage, reduce_once):
    ranks(2).run(_step, stage, reduce_once, None, False, timeout_s=30)
