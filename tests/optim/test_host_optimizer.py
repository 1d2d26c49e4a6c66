"""Optimizer state in host memory: the numbers of state where the parameters are, and those of float32 masters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn, optim

from dsgraph.inductor_ext.transfers.lanes import CpuLane
from dsgraph.optim.delayed import DelayedHostOptimizer
from dsgraph.optim.hooks import ELEMENTWISE
from dsgraph.optim.host_optimizer import MASTER, HostOptimizer
from dsgraph.optim.moves import FromDevice, Move
from dsgraph.utils.errors import OffloadError

OPTIONS = {optim.SGD: {"momentum": 0.9}, optim.AdamW: {"amsgrad": True}, optim.RMSprop: {"momentum": 0.5}}


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 16), nn.Linear(16, 3)).to(dtype)


def _gradients(net: nn.Module, steps: int, *, seed: int = 1) -> Iterator[None]:
    dtype = net[0].weight.dtype
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps):
        net(torch.randn(8, 24, generator=generator).to(dtype)).pow(2).mean().backward()
        if number == 1:  # a parameter that has no gradient in one step
            net[1].weight.grad = None
        yield


def _train(net: nn.Module, optimizer: optim.Optimizer, steps: int, *, seed: int = 1) -> None:
    for _ in _gradients(net, steps, seed=seed):
        optimizer.step()
        optimizer.zero_grad()


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


def _adamw(net: nn.Module, **options) -> optim.AdamW:
    return optim.AdamW([{"params": net[:2].parameters(), "lr": 1e-2}, {"params": net[2:].parameters()}], **options)


class _Masters:
    """AdamW on float32 masters, written out: what is to come of 16-bit parameters."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.masters = net, copy.deepcopy(net).float()
        self.optimizer = _adamw(self.masters, fused=True)

    def step(self) -> None:
        for param, master in zip(self.net.parameters(), self.masters.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.net.parameters(), self.masters.parameters(), strict=True):
            param.data.copy_(master.data)

    def zero_grad(self) -> None:
        self.net.zero_grad()


class _Late(_Masters):
    """The same, each update one step late."""

    late: tuple[Tensor, ...] | None = None

    def step(self) -> None:
        shown = self.late
        super().step()
        self.late = tuple(master.detach().clone() for master in self.masters.parameters())
        shown = shown or tuple(param.data.clone() for param in self.first)
        for param, value in zip(self.net.parameters(), shown, strict=True):
            param.data.copy_(value)

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.first = [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_float32_is_stepped_on_in_place_with_the_same_numbers(kind, ratio):
    nets = _net(), _net()
    usual, inner = (
        kind(
            [{"params": net[:2].parameters(), "lr": 1e-2}, {"params": net[2:].parameters()}],
            lr=1e-3,
            **OPTIONS.get(kind, {}),
        )
        for net in nets
    )
    on_host = HostOptimizer(inner, ratio=ratio, chunk_bytes=2048)
    for optimizer, net in ((usual, nets[0]), (on_host, nets[1])):
        _train(net, optimizer, 2)
        optimizer.param_groups[0]["lr"] *= 0.5  # as a schedule does
        _train(net, optimizer, 2, seed=2)
    assert _same(*nets)
    for param, theirs in zip(*(net.parameters() for net in nets), strict=True):
        assert usual.state[param].keys() == on_host.state[theirs].keys(), "no master"
        for key, value in usual.state[param].items():
            assert torch.equal(torch.as_tensor(on_host.state[theirs][key]), torch.as_tensor(value))
    assert inner.state == {}


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_16_bits_have_masters_of_float32(dtype, ratio):
    one, other = _net(dtype), _net(dtype)
    expected = _Masters(one)
    on_host = HostOptimizer(_adamw(other), ratio=ratio, chunk_bytes=1024)
    _train(one, expected, 5)
    _train(other, on_host, 5)
    assert _same(one, other)
    for param, master in zip(other.parameters(), expected.masters.parameters(), strict=True):
        assert torch.equal(on_host.state[param][MASTER], master)
        assert on_host.state[param]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("make", [HostOptimizer, pytest.param(DelayedHostOptimizer, id="delayed")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:delayed_update")
def test_state_goes_through_state_dict(dtype, make):
    one, other = _net(dtype), _net(dtype)
    first, second = make(_adamw(one)), make(_adamw(other))
    _train(one, first, 3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.load_state_dict(one.state_dict())  # in either order
    _train(one, first, 3, seed=2)
    _train(other, second, 3, seed=2)
    assert _same(one, other)
    first.finish()
    usual = _adamw(other)
    usual.load_state_dict(first.state_dict())
    _train(other, usual, 1)


def test_what_is_written_to_a_parameter_counts():
    net = _net(torch.bfloat16)
    optimizer = HostOptimizer(_adamw(net))
    _train(net, optimizer, 2)
    masters = [optimizer.state[param][MASTER].clone() for param in net.parameters()]
    with torch.no_grad():
        net[0].weight[0] = 7
    for group in optimizer.param_groups:
        group.update(lr=0, weight_decay=0)
    _train(net, optimizer, 1)
    assert torch.equal(net[0].weight[0], torch.full((24,), 7, dtype=torch.bfloat16))
    found = [optimizer.state[param][MASTER] for param in net.parameters()]
    assert torch.equal(found[0][1:], masters[0][1:]), "where nothing was written, the master keeps its bits"
    assert all(map(torch.equal, found[1:], masters[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_delayed_update_comes_one_step_late(dtype):
    one, other = _net(dtype), _net(dtype)
    expected = _Late(one)
    with pytest.warns(UserWarning, match="delayed_update: every gradient is of parameters that lack"):
        delayed = DelayedHostOptimizer(_adamw(other))
    for number, (_, _) in enumerate(zip(_gradients(one, 5), _gradients(other, 5), strict=True)):
        for optimizer in (expected, delayed):
            optimizer.step()
            optimizer.zero_grad()
            if optimizer is delayed:
                delayed.param_groups[0]["lr"] *= 0.5  # of the next step
            else:
                expected.optimizer.param_groups[0]["lr"] *= 0.5
        assert _same(one, other), f"after step {number}"
    delayed.finish()
    for param, master in zip(other.parameters(), expected.masters.parameters(), strict=True):
        assert torch.equal(param, master.to(dtype))


def _refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(OffloadError, match=said):
        make()


def test_what_cannot_be_on_the_host_is_refused():
    _refused(lambda: HostOptimizer(optim.Adafactor(_net().parameters())), "Adafactor cannot be offloaded")
    _refused(lambda: HostOptimizer(optim.AdamW(_net().parameters()), ratio=1.5), "ratio is 1.5; it takes a share")
    net = _net()
    stepped = optim.AdamW(net.parameters())
    _train(net, stepped, 1)
    _refused(lambda: HostOptimizer(stepped), "AdamW has stepped already")


class _ByCopies(HostOptimizer):
    """Takes parameters on the CPU for a device's: the moves of CUDA, over copies."""

    def _move(self, param: Tensor) -> Move:
        self.most = max(getattr(self, "most", 0), self._pool.used)
        return FromDevice(param, lane=CpuLane(), pool=self._pool)


def test_host_memory_of_transfers_is_that_of_some_chunks():
    net, alone = (nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))).bfloat16() for _ in range(2))
    alone.load_state_dict(net.state_dict())
    optimizer = _ByCopies(optim.AdamW(net.parameters()), chunk_bytes=2 * 64 * 64)  # one parameter each
    plain = HostOptimizer(optim.AdamW(alone.parameters()))
    for _ in range(2):
        for model, each in ((net, optimizer), (alone, plain)):
            model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            each.step()
            each.zero_grad()
    assert _same(net, alone)
    assert optimizer.most <= 3 * 2 * 2 * 64 * 64  # three chunks, each a gradient and rounded parameters
    assert optimizer._pool.used == 0
