"""State in host memory of parameters on a GPU: copies, streams and pinned memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

from dsgraph.optim.delayed import DelayedHostOptimizer
from dsgraph.optim.host_optimizer import MASTER, HostOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).to("cuda", dtype)


def _reference(net: nn.Module, steps: int) -> nn.Module:
    """Train with AdamW on float32 masters on the CPU, one copy after the other; gradients by the GPU."""
    net, masters = copy.deepcopy(net), copy.deepcopy(net).float().cpu()
    optimizer = optim.AdamW(masters.parameters(), lr=1e-2, fused=True)
    for number in range(steps):
        _backward(net, number)
        for param, master in zip(net.parameters(), masters.parameters(), strict=True):
            master.grad = param.grad.cpu().float()
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(net.parameters(), masters.parameters(), strict=True):
                param.copy_(master)
        net.zero_grad()
    return net


def _backward(net: nn.Module, number: int) -> None:
    torch.manual_seed(number)
    x = torch.randn(64, 512, device="cuda", dtype=net[0].weight.dtype)
    net(x).pow(2).mean().backward()


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_are_those_of_masters_on_the_cpu(dtype, pin_memory):
    net = _net(dtype)
    expected = _reference(net, 4)
    optimizer = HostOptimizer(optim.AdamW(net.parameters(), lr=1e-2), pin_memory=pin_memory, chunk_bytes=2**20)
    for number in range(4):
        _backward(net, number)
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert all(value.device.type == "cpu" for value in optimizer.state[mine].values())
        assert (MASTER in optimizer.state[mine]) is (dtype is torch.bfloat16)


def test_a_share_of_the_state_stays_on_the_device():
    net = _net(torch.float32)
    optimizer = HostOptimizer(optim.AdamW(net.parameters()), ratio=0.5)
    _backward(net, 0)
    optimizer.step()
    places = [optimizer.state[param]["exp_avg"].device.type for param in net.parameters()]
    assert places == ["cpu"] * 6 + ["cuda"] * 6


@pytest.mark.filterwarnings("ignore:delayed_update")
def test_a_delayed_update_comes_one_step_late():
    net = _net(torch.bfloat16)
    before = copy.deepcopy(net)
    expected = _reference(net, 1)
    optimizer = DelayedHostOptimizer(optim.AdamW(net.parameters(), lr=1e-2))
    for shown in (before, expected):
        _backward(net, 0)
        optimizer.step()
        optimizer.zero_grad()
        assert all(map(torch.equal, net.parameters(), shown.parameters()))
