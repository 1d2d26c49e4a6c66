"""Checkpoints of a model without an engine, in layouts that one rank imitates."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dsgraph.checkpoint.model_tensors import ModelTensors
from dsgraph.checkpoint.model_training import ModelTraining
from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.ranks.agreement import Agreement

pytestmark = pytest.mark.distributed


def _training(tensors: ModelTensors, optimizer: torch.optim.Optimizer | None = None) -> ModelTraining:
    return ModelTraining(Agreement((0,), timedelta(seconds=60)), lambda: tensors, optimizer)


def test_random_states_come_back_in_the_same_layout_only(one_rank, tmp_path: Path):
    model = nn.Linear(2, 2)
    tensors, optimizer = ModelTensors.of(model), torch.optim.SGD(model.parameters())
    torch.manual_seed(1)
    saved = torch.get_rng_state()
    _training(tensors, optimizer).save(tmp_path, "a", None)
    torch.manual_seed(2)
    other = torch.get_rng_state()
    _training(replace(tensors, layout={"dp": 1, "tp": 2, "pp": 1}), optimizer).load(tmp_path, "a")
    assert torch.equal(torch.get_rng_state(), other)
    _training(tensors, optimizer).load(tmp_path, "a")
    assert torch.equal(torch.get_rng_state(), saved)


def test_full_tensors_of_slices_are_read_into_host_memory(one_rank, tmp_path: Path):
    model, found = nn.Linear(2, 2, bias=False), dict[str, torch.Tensor]()
    _training(ModelTensors.of(model)).save(tmp_path, "a", None)
    group = dist.group.WORLD
    assert group is not None
    piece = nn.Parameter(torch.empty(2, 2, device="meta"))  # stands for a device that has no room
    tensors = replace(
        ModelTensors.of(model),
        parameters={"weight": piece},
        values={"weight": piece.detach()},
        slices={"weight": ParameterSlice(dim=0, parts=1, ranks=1, group=group.group_name)},
        put=found.update,
    )
    full: list[str] = []
    own = ModelTensors.own

    class Noting(ModelTensors):
        def own(self, name: str, value: torch.Tensor) -> torch.Tensor:
            full.append(value.device.type)
            return own(self, name, value)

    _training(Noting(**vars(tensors))).load(tmp_path, "a")
    assert full == ["cpu"] and found["weight"].device.type == "meta"
