"""Flags of optimizers: element-wise updates, and updates that need full matrices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import dsgraph
from dsgraph.optim.full_matrix import FullMatrixOptimizer, whole_where_needed
from dsgraph.optim.hooks import OptimizerHooks, hooks_of, is_elementwise
from dsgraph.optim.host_optimizer import HostOptimizer
from dsgraph.utils.errors import OffloadError
from tests.distributed.training import full


class Sign(OptimizerHooks, Optimizer):
    is_elementwise = True

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad.sign())


class Centered(OptimizerHooks, Optimizer):
    """Subtracts the mean over all rows from a gradient."""

    needs_full_matrices = True

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad - param.grad.mean(0))


def test_an_elementwise_optimizer_may_be_offloaded():
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    optimizer = HostOptimizer(Sign(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 1)
    with pytest.raises(OffloadError, match="Centered cannot be offloaded"):
        HostOptimizer(Centered(nn.Linear(3, 3).parameters()))


def test_optimizers_of_torch_have_the_defaults():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)
    hooks = hooks_of(optimizer)
    assert is_elementwise(optimizer) and not hooks.is_compressing and not hooks.needs_full_matrices
    hooks.start_reading()
    hooks.finish()
    hooks.close()


def _full_matrices() -> None:
    torch.manual_seed(0)
    plain, model = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model.load_state_dict(plain.state_dict())
    dsgraph.partition(model, stage=3, keep_whole_below=0)
    x = torch.arange(8.0).reshape(2, 4)
    for each in (plain, model):
        each(x).square().sum().backward()
    with pytest.raises(dsgraph.PartitionError, match="it needs all rows of a parameter at once"):
        Centered(model.parameters()).step()
    optimizer = whole_where_needed(Centered(model.parameters()))
    assert isinstance(optimizer, FullMatrixOptimizer)
    optimizer.step()
    Centered(plain.parameters()).step()
    torch.testing.assert_close(full(next(model.parameters())), plain.weight)
    dist.barrier()


@pytest.mark.distributed
def test_one_that_needs_full_matrices_is_refused_on_rows_and_right_on_matrices(ranks):
    ranks(2).run(_full_matrices)
