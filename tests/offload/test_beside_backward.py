"""An optimizer on disk that steps while the backward runs: the same numbers, and no step that is half done in silence."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import dsgraph
from dsgraph.errors import OffloadError
from dsgraph.offload.optimizer import OptimizerOnDisk
from tests.distributed.training import full
from tests.models import CASES, build

pytestmark = pytest.mark.distributed


def _train(case: str, folder: str, *, beside: bool, codegen: str = "eager", micro_batches: int = 1) -> list[Tensor]:
    torch.compiler.reset()
    offload = {"parameters": "disk", "folder": folder}
    model = dsgraph.partition(build(case), stage=3, keep_whole_below=12, offload=offload)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": codegen})
    optimizer = OptimizerOnDisk(optim.AdamW(model.parameters(), lr=1e-2), folder=Path(folder), chunk_bytes=64)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen, begun = list[Tensor](), 0
    for step in range(3):
        for number in range(micro_batches):
            is_last = number == micro_batches - 1
            with nullcontext() if is_last else dsgraph.accumulate(model):
                loss = compiled(*CASES[case].batches(step * micro_batches + number, dist.get_rank()))
                with optimizer.beside_backward() if beside and is_last else nullcontext():
                    loss.backward()
            seen.append(loss.detach())
        begun += optimizer.begun
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert (begun > 0) is (beside and case != "frozen_all")
    return [*seen, *(full(param.detach()) for param in model.parameters())]


def _same(case: str, folder: str, codegen: str, micro_batches: int) -> None:
    expected = _train(case, folder, beside=False, codegen=codegen, micro_batches=micro_batches)
    found = _train(case, folder, beside=True, codegen=codegen, micro_batches=micro_batches)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("case", "world", "codegen", "micro_batches"),
    [
        *(("tied", 2, "eager", 2), ("graph_break", 2, "eager", 1), ("gpt", 1, "eager", 1)),
        pytest.param("gpt", 2, "inductor", 2, marks=[pytest.mark.inductor, pytest.mark.full]),
        *(
            pytest.param(case, world, "eager", number, marks=pytest.mark.full)
            for case in ("tied", "frozen", "uneven", "graph_break", "gpt", "dynamic_gpt", "dropout")
            for world in (1, 2)
            for number in (1, 2)
        ),
    ],
)
def test_numbers_are_those_of_a_step_behind_the_backward(ranks, case, world, codegen, micro_batches, tmp_path):
    ranks(world).run(_same, case, str(tmp_path), codegen, micro_batches)
