"""Operations of a model: checkpoints recompute, which is no operation of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import dsgraph
from dsgraph.compiler.module_flops import model_flops
from dsgraph.partitioning.state import partition_states


class _Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor, weight: float = 1.0) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean() * weight


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_operations_are_counted_once_for_the_module_that_has_them(one_rank, reentrant):
    plain, x = _Net(None), torch.randn(5, 3)
    with FlopCounterMode(display=False) as counter:
        plain(x).backward()
    model = dsgraph.partition(_Net(reentrant), stage=3)
    (part,) = partition_states(model)
    before = torch.get_rng_state()
    found = model_flops(model, part.parameters, (x,), {"weight": 2.0})
    once = 2 * 5 * 8 * 8
    assert found.forward == {"first": 2 * 5 * 3 * 8, "blocks.0.0": once, "blocks.1.0": once}
    assert found.backward == {"first": 2 * 5 * 3 * 8, "blocks.0.0": 2 * once, "blocks.1.0": 2 * once}
    assert found.total == counter.get_total_flops()
    assert torch.equal(torch.get_rng_state(), before) and all(param.grad is None for param in model.parameters())
