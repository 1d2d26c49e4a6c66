"""Parameters that `partition` leaves out: each rank's own values and gradients, and the norm of all of them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from dsgraph.utils.errors import ConfigError, PartitionError
from tests.distributed.training import full

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.expert, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        nn.init.normal_(self.expert.weight, generator=torch.Generator().manual_seed(rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.expert(torch.tanh(self.body(x))))).square().mean()


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _alone(world: int) -> tuple[list[nn.Module], list[float]]:
    """The models of all ranks, whose common parameters get the mean gradient, and the norms before each step."""
    nets, norms = [Net(rank) for rank in range(world)], []
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in nets]
    for step in range(3):
        for rank, net in enumerate(nets):
            net(_batch(step, rank)).backward()
        common = [name for name, _ in nets[0].named_parameters() if not name.startswith("expert")]
        for name in common:
            params = [net.get_parameter(name) for net in nets]
            mean = sum(param.grad for param in params) / world
            for param in params:
                param.grad = mean.clone()
        squares = [nets[0].get_parameter(name).grad.square().sum() for name in common]
        squares += [param.grad.square().sum() for net in nets for param in net.expert.parameters()]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        for net, optimizer in zip(nets, optimizers, strict=True):
            nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, torch.tensor(norms[-1]))
            optimizer.step()
            optimizer.zero_grad()
    return nets, norms


def _train(stage: int, codegen: str | None) -> None:
    rank = dist.get_rank()
    nets, norms = _alone(dist.get_world_size())
    net = Net(rank)
    dsgraph.partition(net, stage=stage, keep_whole_below=0, ignored_params=net.expert.parameters())
    run = net if codegen is None else torch.compile(net, backend="dsgraph", options={"codegen": codegen})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step, norm in enumerate(norms):
        run(_batch(step, rank)).backward()
        found = full(nn.utils.clip_grad_norm_(net.parameters(), 0.1))
        torch.testing.assert_close(float(found), norm, rtol=1e-5, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    for mine, other in zip(net.parameters(), nets[rank].parameters(), strict=True):
        torch.testing.assert_close(full(mine), other, rtol=1e-5, atol=1e-5)
    dsgraph.partition(net)  # nothing is new
    assert type(net.expert.weight) is nn.Parameter
    fused = torch.optim.AdamW(net.parameters(), fused=True)
    run(_batch(0, rank)).backward()
    with pytest.raises(PartitionError, match="give those a group of their own"):
        fused.step()


@pytest.mark.parametrize(
    ("world", "stage", "codegen"),
    [
        (2, 3, "eager"),
        *(pytest.param(2, stage, codegen, marks=pytest.mark.full) for stage in range(4) for codegen in (None, "eager")),
        pytest.param(4, 1, None, marks=pytest.mark.full),
    ],
)
def test_ranks_keep_their_own_experts(ranks, world, stage, codegen):
    ranks(world).run(_train, stage, codegen)


def _told(*seeds: int) -> list[str]:
    torch.manual_seed(0)
    net = Net(dist.get_rank())
    torch.manual_seed(seeds[dist.get_rank()])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dsgraph.partition(net, stage=1)
    assert torch.equal(full(net.expert.weight), Net(0).expert.weight)
    return [str(each.message) for each in found]


def test_values_that_only_a_purpose_explains_are_told(ranks):
    for (told,) in ranks(2).run(_told, 5, 5):
        assert "parameter 'expert.weight' (1 in all) has other values on other ranks" in told
    assert ranks(2).run(_told, 5, 6) == [[], []]


@pytest.mark.parametrize("ignored", [[nn.Parameter(torch.ones(2))], "expert", [torch.ones(2)]])
def test_what_is_no_parameter_of_the_model_is_refused(one_rank, ignored):
    with pytest.raises(PartitionError, match="it takes parameters of the model, found"):
        dsgraph.partition(Net(0), ignored_params=ignored)
    with torch.device("meta"):
        net = nn.Linear(3, 3)
    with pytest.raises(PartitionError, match="'weight' is on the meta device"):
        dsgraph.partition(net, ignored_params=[net.weight])


def test_an_engine_refuses_them(one_rank):
    net = Net(0)
    dsgraph.partition(net, ignored_params=net.expert.parameters())
    with pytest.raises(ConfigError, match="would not clip the ignored_params of this model"):
        dsgraph.initialize(model=net, config={"train_batch_size": 2, "optimizer": {"type": "AdamW"}})
