"""Writes of an uncompiled forward to a parameter take effect, as outside of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsgraph
from tests.distributed.training import ATOL, RTOL, full

pytestmark = pytest.mark.distributed


def _replace(weight: Tensor) -> None:
    weight.data = torch.linspace(-1, 1, weight.numel()).view(weight.shape)


def _row(weight: Tensor) -> None:
    weight[1] = 0.25


def _column_in_place(weight: Tensor) -> None:
    weight.t()[2].mul_(3)


WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda weight: weight.data.clamp_(-0.1, 0.1),
    lambda weight: weight.detach().mul_(0.5),
    _replace,
    torch.no_grad()(lambda weight: weight.copy_(torch.ones_like(weight))),
    torch.no_grad()(lambda weight: nn.init.constant_(weight, 0.3)),
    torch.no_grad()(_row),
    torch.no_grad()(_column_in_place),
)


class Writing(nn.Module):
    """Writes to its weights in its forward, and in a hook of a layer."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(4, 6), nn.Linear(6, 3), write
        self.second.register_forward_pre_hook(self._before_second)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        self._write()
        return self.second(torch.tanh(self.first(x))).square().mean()

    def _before_second(self, module: nn.Module, args: object) -> None:
        self.write(self.second.weight)

    @torch._dynamo.disable
    def _write(self) -> None:
        self.write(self.first.weight)


def _compare(stage: int) -> None:
    for write in WRITES:
        torch.manual_seed(0)
        alone = Writing(write)
        torch.manual_seed(dist.get_rank())
        model = dsgraph.partition(Writing(write), stage=stage, keep_whole_below=20)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
        for step in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            losses = [each(x) for each in (alone, model)]
            torch.testing.assert_close(losses[1], losses[0], rtol=RTOL, atol=ATOL)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full(mine), theirs, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_what_a_forward_writes_takes_effect(ranks, stage):
    ranks(2).run(_compare, stage)


def _fast_paths() -> None:
    """Computing is left to torch: what a forward is given looks like a plain tensor to it."""
    model = dsgraph.partition(nn.Linear(4, 3), stage=3, keep_whole_below=0)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    model(torch.ones(1, 4))
    assert not torch.overrides.has_torch_function(seen)
    assert type(seen[0] * 2) is Tensor and type(seen[0].view(-1)) is Tensor
    with pytest.raises(RuntimeError, match="modified inplace"):
        seen[0].mul_(2)


def test_computing_with_it_is_plain(one_rank):
    _fast_paths()
