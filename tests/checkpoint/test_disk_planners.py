"""`dcp.save` and `dcp.load` of what lies on disk, by the planners that bring no more than a tensor into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import dsgraph
from dsgraph.checkpoint.disk_planners import LoadPlannerToDisk, SavePlannerFromDisk
from dsgraph.offload.slots import SlotFile
from dsgraph.offload.stored_tensor import StoredTensor
from dsgraph.optim.disk_optimizer import DiskOptimizer
from tests.distributed.training import full
from tests.models import CASES, build

pytestmark = pytest.mark.distributed


def _made(folder: str | None, seed: int, ratio: float = 1.0) -> tuple[nn.Module, optim.Optimizer, Any]:
    torch.compiler.reset()
    offload = None if folder is None else {"parameters": "disk", "folder": folder, "ratio": ratio}
    model = dsgraph.partition(build("uneven", seed), stage=3, keep_whole_below=12, offload=offload)
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    if folder is not None:
        optimizer = DiskOptimizer(optimizer, folder=Path(folder), ratio=ratio, chunk_bytes=1024)
    return model, optimizer, torch.compile(model, backend="dsgraph", options={"codegen": "eager"})


def _train(model: nn.Module, optimizer: optim.Optimizer, compiled: Any, first: int) -> list[Tensor]:
    for number in range(first, first + 2):
        compiled(*CASES["uneven"].batches(number, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(param.detach()).clone() for param in model.parameters()]


def _save(place: str) -> None:
    model, optimizer, compiled = _made(f"{place}/disk", 0)
    _train(model, optimizer, compiled, 0)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{place}/saved", planner=SavePlannerFromDisk(optimizer))


def _load(place: str) -> None:
    trained = []
    for folder in (None, f"{place}/disk"):
        model, optimizer, compiled = _made(folder, 1, 0.6)
        # Of an optimizer that has not stepped it makes the state.
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        planner = None if folder is None else LoadPlannerToDisk(optimizer)
        dcp.load(state, checkpoint_id=f"{place}/saved", planner=planner)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        trained.append(_train(model, optimizer, compiled, 2))
    for mine, theirs in zip(*trained, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), *(pytest.param(1, n, marks=pytest.mark.full) for n in (1, 2))])
def test_planners_save_and_load_on_other_ranks(ranks, tmp_path, saving, loading):
    ranks(saving).run(_save, str(tmp_path))
    ranks(loading).run(_load, str(tmp_path))


def test_parts_of_a_tensor_are_written_where_they_belong(tmp_path, monkeypatch):
    monkeypatch.setenv("DSGRAPH_OFFLOAD_CHECKSUMS", "1")
    file = SlotFile([5000, 9000], below=tmp_path, name="slots")
    tensors = [StoredTensor(file, 1, start, torch.float32, torch.Size([20, 30])) for start in (64, 2496)]
    expected = [torch.zeros(20, 30), torch.randn(20, 30)]
    tensors[1].write(expected[1], [0, 0])
    for start, part in (([3, 0], torch.randn(7, 30)), ([2, 4], torch.randn(9, 11)), ([19, 0], torch.randn(1, 30))):
        tensors[0].write(part.double(), start)
        expected[0][start[0] : start[0] + part.shape[0], start[1] : start[1] + part.shape[1]] = part
    for tensor, value in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.read(), value)
    assert not any(file.path.read_bytes()[:8192]), "the slot before"
