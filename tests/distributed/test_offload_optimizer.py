"""`partition(offload={"optimizer": ...})` and `dsgraph.offload_optimizer`: the same training, its state elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import dsgraph
from dsgraph.offload.stored_rows import stored_rows
from dsgraph.optim.disk_optimizer import DiskOptimizer
from dsgraph.optim.host_optimizer import HostOptimizer
from dsgraph.utils.errors import OffloadError, PartitionError
from tests.models import CASES, build

from .training import full

pytestmark = pytest.mark.distributed


def _train(case: str, stage: int, offload: dict[str, Any] | None, dtype: torch.dtype) -> list[Tensor]:
    torch.compiler.reset()
    model = dsgraph.partition(build(case).to(dtype), stage=stage, keep_whole_below=12, offload=offload)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    fused = dtype is torch.bfloat16  # as its masters are stepped on
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=fused or None)
    if offload is not None:
        optimizer = dsgraph.offload_optimizer(optimizer, model)
        assert isinstance(optimizer, HostOptimizer if offload["optimizer"] == "host" else DiskOptimizer)
    seen = []
    for step in range(3):
        for number in range(2):
            inputs = CASES[case].batches(step * 2 + number, dist.get_rank())
            inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
            loss = compiled(*inputs)
            loss.backward()
            seen.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(full(param.detach()) for param in model.parameters())]


def _same(case: str, stage: int, offload: dict[str, Any]) -> None:
    expected = _train(case, stage, None, torch.float32)
    for mine, theirs in zip(_train(case, stage, offload, torch.float32), expected, strict=True):
        assert torch.equal(mine, theirs)


_MATRIX = [
    (stage, world, offload)
    for stage in range(4)
    for world in (1, 2)
    for offload in ({"optimizer": "host"}, {"optimizer": "disk", "ratio": 0.5})
]


@pytest.mark.parametrize(
    ("stage", "world", "offload"),
    [
        pytest.param(1, 2, {"optimizer": "host", "ratio": 0.5}, marks=pytest.mark.full),
        (3, 2, {"optimizer": "host", "parameters": "disk", "ratio": {"parameters": 0.5}}),
        *(pytest.param(*case, marks=pytest.mark.full) for case in _MATRIX),
        pytest.param(3, 2, {"optimizer": "disk", "parameters": "disk"}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("case", ["tied", pytest.param("frozen", marks=pytest.mark.full)])
def test_numbers_are_those_of_state_in_memory(ranks, case, stage, world, offload, tmp_path):
    if "disk" in offload.values():
        offload = {**offload, "folder": str(tmp_path)}
    ranks(world).run(_same, case, stage, offload)


def _step(net: nn.Module, optimizer: optim.Optimizer) -> None:
    net(torch.ones(4, net.in_features)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_optimizer_that_steps_elsewhere_is_refused(one_rank, tier):
    net = dsgraph.partition(nn.Linear(64, 64), stage=1, offload={"optimizer": tier})
    plain = optim.AdamW(net.parameters())
    with pytest.raises(PartitionError, match=rf"AdamW: .*{tier}.*: use dsgraph\.offload_optimizer\(optimizer"):
        _step(net, plain)
    _step(net, dsgraph.offload_optimizer(plain, net))


def test_without_a_folder_it_is_the_one_for_temporary_files(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    net = dsgraph.partition(nn.Linear(256, 256), stage=3, offload={"optimizer": "host", "parameters": "disk"})
    weight = next(net.parameters())
    stored = stored_rows(weight.to_local())
    assert stored is not None and list(tmp_path.rglob("parameters"))
    before = full(weight.detach()).clone()
    _step(net, dsgraph.offload_optimizer(optim.AdamW(net.parameters()), net))
    assert not torch.equal(full(weight.detach()), before)


@pytest.mark.parametrize(
    ("offload", "how", "said"),
    [
        (None, {}, "was not partitioned with one offload"),
        ({"parameters": "disk"}, {}, "was not partitioned with one offload"),
        ({"optimizer": "disk"}, {"delayed": True}, 'only updates on the "host" can be delayed'),
        ({"optimizer": "host", "ratio": 0.5}, {"delayed": True}, "50% of the state is on the host"),
    ],
)
def test_what_offload_optimizer_cannot_do_is_refused(one_rank, offload, how, said):
    net = dsgraph.partition(nn.Linear(64, 64), stage=3, offload=offload)
    with pytest.raises(OffloadError, match=said):
        dsgraph.offload_optimizer(optim.AdamW(net.parameters()), net, **how)
