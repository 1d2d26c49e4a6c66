"""Writes of a script to `model.parameters()` reach the shards equally on all ranks, or are refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from dsgraph.utils.errors import PartitionError, RanksDisagreeError

pytestmark = pytest.mark.distributed


def _net(stage: int) -> nn.Module:
    torch.manual_seed(0)
    return dsgraph.partition(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), stage=stage, keep_whole_below=20)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _drift(stage: int) -> None:
    rank = dist.get_rank()
    model = _net(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bias = model[1]._parameters["bias"]
    kept = bias.detach().clone()
    bias.data.add_(rank)  # which leaves no trace
    with pytest.raises(RanksDisagreeError, match=r"parameter '1.bias', which is replicated, was written to"):
        _step(model, optimizer)
    bias.data.copy_(kept)
    model.zero_grad()
    _step(model, optimizer)
    with torch.no_grad():
        bias.mul_(2)  # alike
    _step(model, optimizer)
    with torch.no_grad():
        bias.add_(rank)
    with pytest.raises(RanksDisagreeError, match="nothing was updated"):
        _step(model, optimizer)


@pytest.mark.parametrize("stage", (0, 3))
def test_replicas_that_drift_apart_are_noticed_ahead_of_a_step(ranks, stage):
    ranks(2).run(_drift, stage)


def _replace(stage: int, compiled: bool) -> None:
    model = _net(stage)
    torch._dynamo.reset()
    run = torch.compile(model, backend="dsgraph", options={"codegen": "eager"}) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(run, optimizer)
    copy.deepcopy(model)(torch.ones(2, 4))
    if not compiled:  # torch cannot do so with what Dynamo has seen
        model.double().float()  # exchanges shards and rows
    _step(run, optimizer)
    weight = model[0]._parameters["weight"]
    weight.data = weight.data * 2
    said = r"parameter '0.weight': its .data was replaced, which does not reach the shards"
    with pytest.raises(Exception, match=said), torch.no_grad():
        run(torch.ones(2, 4))
    with pytest.raises(PartitionError, match=said):
        optimizer.step()


@pytest.mark.parametrize(("stage", "compiled"), ((0, False), (1, True), (3, True)))
def test_replaced_data_is_refused(ranks, stage, compiled):
    ranks(2).run(_replace, stage, compiled)


def _numbers(stage: int) -> None:
    model = _net(stage)
    weight = model[0]._parameters["weight"]
    full = weight.full_tensor()
    assert weight.norm().item() == pytest.approx(full.norm().item())
    assert float(weight.sum()) == pytest.approx(float(full.sum()))
    if dist.get_rank() == 1:
        with torch.no_grad():
            weight.to_local()[-1] = float("nan")
    expected = stage > 0 or dist.get_rank() == 1
    assert bool(torch.isnan(weight).any()) == expected
    if stage and dist.get_rank() == 0:
        with pytest.raises(RanksDisagreeError, match=r"reads a number from shards.*did not reach it within 1 s"):
            weight.norm().item()


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_numbers_are_those_of_whole_parameters(ranks, stage):
    ranks(2).run(_with_patience, stage)


def _with_patience(stage: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSGRAPH_EAGER_PATIENCE", "1")
        _numbers(stage)
