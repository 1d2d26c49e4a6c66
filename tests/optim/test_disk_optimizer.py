"""Optimizer state on disk: the numbers of state in memory, and errors where the disk is not what it was."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from dsgraph.checkpoint.disk_planners import SavePlannerFromDisk
from dsgraph.optim.disk_optimizer import DiskOptimizer
from dsgraph.optim.hooks import ELEMENTWISE
from dsgraph.utils.errors import OffloadError

OPTIONS = {optim.SGD: {"momentum": 0.9}, optim.AdamW: {"amsgrad": True}, optim.RMSprop: {"momentum": 0.5}}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Linear(32, 16), nn.Linear(16, 3)).double()


def _train(net: nn.Module, optimizer: optim.Optimizer, steps: int, *, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number in range(steps):
        net(torch.randn(8, 24, generator=generator, dtype=torch.float64)).pow(2).mean().backward()
        if number == 1:  # a parameter that has no gradient in one step
            net[1].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()


def _two(kind: type, folder: Path, **options) -> tuple[nn.Module, optim.Optimizer, nn.Module, DiskOptimizer]:
    nets = _net(), _net()
    usual, inner = (
        kind([{"params": net[:2].parameters(), "lr": 1e-2}, {"params": net[2:].parameters()}], lr=1e-3, **options)
        for net in nets
    )
    return nets[0], usual, nets[1], DiskOptimizer(inner, folder=folder, chunk_bytes=4096)


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_the_numbers_are_those_of_state_in_memory(kind, tmp_path):
    net, usual, other, on_disk = _two(kind, tmp_path, **OPTIONS.get(kind, {}))
    assert len(on_disk.chunks) > 2
    for optimizer in (usual, on_disk):
        _train(net if optimizer is usual else other, optimizer, 2)
        optimizer.param_groups[0]["lr"] *= 0.5  # as a schedule does
        _train(net if optimizer is usual else other, optimizer, 2, seed=2)
    assert _same(net, other)
    for param, theirs in zip(net.parameters(), other.parameters(), strict=True):
        for key, value in usual.state[param].items():
            found = on_disk.state[theirs][key]
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


def test_state_lies_in_the_file_and_not_in_memory(tmp_path):
    net, _, other, on_disk = _two(optim.AdamW, tmp_path)
    _train(other, on_disk, 1)
    assert on_disk.inner.state == {}
    kept = sum(param.numel() for param in net.parameters()) * 2 * 8
    assert kept <= on_disk.path.stat().st_size == on_disk.disk_bytes
    assert on_disk.path.read_bytes().strip(b"\0"), "and is not all zero"
    assert on_disk.path.is_relative_to(tmp_path) and on_disk.buffer_bytes < on_disk.disk_bytes


def test_a_ratio_of_the_state_lies_in_the_file_and_the_rest_in_memory(tmp_path):
    net, _, other, _ = _two(optim.AdamW, tmp_path)
    whole = DiskOptimizer(optim.AdamW(other.parameters(), lr=1e-3), folder=tmp_path, chunk_bytes=4096)
    part = DiskOptimizer(optim.AdamW(other.parameters(), lr=1e-3), folder=tmp_path, ratio=0.5, chunk_bytes=4096)
    assert whole.disk_bytes / 2 <= part.disk_bytes < whole.disk_bytes
    assert part.disk_bytes + part.buffer_bytes >= whole.disk_bytes
    usual = optim.AdamW(net.parameters(), lr=1e-3)
    _train(net, usual, 3)
    _train(other, part, 3)
    assert _same(net, other)
    moved = DiskOptimizer(optim.AdamW(other.parameters(), lr=1e-3), folder=tmp_path, ratio=0.1, chunk_bytes=4096)
    moved.load_state_dict(copy.deepcopy(part.state_dict()))
    for optimizer, model in ((usual, net), (moved, other)):
        _train(model, optimizer, 2, seed=2)
    assert _same(net, other)
    with pytest.raises(OffloadError, match="ratio is 0; it takes a share"):
        DiskOptimizer(optim.AdamW(_net().parameters()), folder=tmp_path, ratio=0)


def test_state_goes_through_state_dict(tmp_path):
    net, usual, other, on_disk = _two(optim.AdamW, tmp_path)
    _train(net, usual, 2)
    _train(other, on_disk, 2)
    saved, weights = copy.deepcopy(on_disk.state_dict()), copy.deepcopy(other.state_dict())
    _train(other, on_disk, 3, seed=5)
    on_disk.load_state_dict(saved)
    other.load_state_dict(weights)
    _train(net, usual, 2, seed=3)
    _train(other, on_disk, 2, seed=3)
    assert _same(net, other)
    usual.load_state_dict(copy.deepcopy(on_disk.state_dict()))
    _train(net, usual, 1, seed=4)
    _train(other, on_disk, 1, seed=4)
    assert _same(net, other)


@pytest.mark.parametrize("ratio", [1.0, 0.4])
def test_a_state_dict_is_that_of_now(ratio, tmp_path):
    net = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3))).double()
    other = copy.deepcopy(net)
    usual, inner = (optim.AdamW(each.parameters(), lr=1e-2) for each in (net, other))
    on_disk = DiskOptimizer(inner, folder=tmp_path, ratio=ratio, chunk_bytes=10000)
    assert [len(chunk.params) for chunk in on_disk.chunks] == [2, 2, 2], "of one size: they use each other's buffers"
    held = []
    for number in range(4):
        _train(net, usual, 1, seed=number)
        _train(other, on_disk, 1, seed=number)
        expected = usual.state_dict()["state"]
        held.append(on_disk.state_dict())
        for found in held:  # a state dict shares memory with the optimizer, as those of torch's do
            for at, state in expected.items():
                assert all(torch.equal(found["state"][at][key], value) for key, value in state.items())
        if number == 2:
            on_disk.load_state_dict(held.pop())  # its own: nothing is lost on the way
            held.clear()  # what is loaded is copied, and no longer shared
    assert _same(net, other)


def test_saving_gives_tensors_that_a_writer_may_hold(tmp_path):
    _, _, net, optimizer = _two(optim.AdamW, tmp_path)
    _train(net, optimizer, 1)
    state = {f"{at}": optimizer.state[param]["exp_avg"] for at, param in enumerate(net.parameters())}
    planner = SavePlannerFromDisk(optimizer)
    planner.set_up_planner(state, is_coordinator=True)
    held = {item.index.fqn: planner.resolve_data(item) for item in planner.create_local_plan().items}
    assert held.keys() == state.keys()
    for name, value in held.items():
        assert value.data_ptr() != state[name].data_ptr(), "read, and not mapped"
        assert torch.equal(value, state[name])
        assert value.any()


def test_what_cannot_be_offloaded_is_refused(tmp_path):
    with pytest.raises(OffloadError, match="Adafactor cannot be offloaded: Adafactor is not known to update each"):
        DiskOptimizer(optim.Adafactor(_net().parameters()), folder=tmp_path)
    net = _net()
    stepped = optim.AdamW(net.parameters())
    _train(net, stepped, 1)
    with pytest.raises(OffloadError, match="AdamW has stepped already"):
        DiskOptimizer(stepped, folder=tmp_path)
    with pytest.raises(OffloadError, match="holds parameters on meta"):
        DiskOptimizer(optim.AdamW(nn.Linear(2, 2, device="meta").parameters()), folder=tmp_path)


def test_a_disk_that_is_too_small_is_an_error_before_anything_is_trained(tmp_path):
    inner = optim.AdamW([nn.Parameter(torch.empty(1, dtype=torch.float64).expand(2**20, 2**20))])
    with pytest.raises(OffloadError, match=r"optimizer-state: \d+ bytes cannot be reserved, \d+ are free"):
        DiskOptimizer(inner, folder=tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == [f"dsgraph-offload-{os.getuid()}", "lock"]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 4096)])
def test_a_file_that_is_lost_ends_in_an_error_and_no_step_follows(damage, tmp_path):
    _, _, net, optimizer = _two(optim.AdamW, tmp_path)
    _train(net, optimizer, 1)
    damage(optimizer.path)
    with pytest.raises(OffloadError, match=r"optimizer-state cannot be read: .* load the last checkpoint"):
        _train(net, optimizer, 1)
    with pytest.raises(OffloadError, match="an earlier step or load failed, and state is lost"):
        optimizer.step()


def test_a_read_whose_checksum_differs_names_file_and_slot(tmp_path, monkeypatch):
    for asked in ("1", "0"):
        monkeypatch.setenv("DSGRAPH_OFFLOAD_CHECKSUMS", asked)
        _, _, net, optimizer = _two(optim.AdamW, tmp_path)
        _train(net, optimizer, 2)
        with optimizer.path.open("r+b") as file:
            file.seek(5000)
            (byte,) = file.read(1)
            file.seek(5000)
            file.write(bytes([byte ^ 1]))
        if asked == "0":
            _train(net, optimizer, 1)
            continue
        with pytest.raises(OffloadError, match=r"optimizer-state: slot 0, .* is not what was written there"):
            _train(net, optimizer, 1)
