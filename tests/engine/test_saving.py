"""A resume restores the values of a checkpoint that are not tensors: counts, schedules, the caller's values."""

from __future__ import annotations

import math
from collections import Counter
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import dsgraph
from tests.engine.training import config

pytestmark = pytest.mark.distributed


class _Squared(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def _engine(schedule: Any = None, **more: Any) -> dsgraph.Engine:
    torch.manual_seed(0)
    settings = config(3, dsgraph={"compile": False}, **more)
    return dsgraph.initialize(model=_Squared(4, 4), config=settings, lr_scheduler=schedule)[0]


def _train(engine: dsgraph.Engine, steps: int) -> list[float]:
    """The same batch for each micro-batch of a step, so that their number changes nothing."""
    rates = []
    for _ in range(steps):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(engine.global_steps))
        engine.train_batch(repeat(x))
        rates.append(engine.get_lr()[0])
    return rates


def _values(engine: dsgraph.Engine) -> list[Any]:
    """All that a load changes."""
    state = engine.optimizer.state
    tensors = [value for param in state for value in (param.to_local(), *state[param].values())]
    schedule = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    local = [(value.to_local() if hasattr(value, "to_local") else value).clone() for value in tensors]
    return [*local, torch.get_rng_state(), engine.get_lr(), repr(schedule), repr(engine.counts)]


def _other_accumulation(folder: str) -> None:
    engine = _engine()
    _train(engine, 3)
    engine.save_checkpoint(folder)
    _train(engine, 2)
    for micro_batches in (2, 4):
        again = _engine(gradient_accumulation_steps=micro_batches)
        again.load_checkpoint(folder)
        assert not again.is_gradient_accumulation_boundary() and again.counts.micro == 3 * micro_batches
        _train(again, 2)
        assert again.global_steps == 5
        for mine, theirs in zip(again.module.parameters(), engine.module.parameters(), strict=True):
            torch.testing.assert_close(mine.to_local(), theirs.to_local())


def test_a_resume_with_other_micro_batches_steps_when_a_step_is_full(ranks, tmp_path):
    ranks(1).run(_other_accumulation, str(tmp_path))


class _Factor:
    """A rule with a state of its own, which torch keeps of what is no function."""

    def __init__(self) -> None:
        self.by = {5: 0.5}

    def __call__(self, step: int) -> float:
        return math.prod(factor for start, factor in self.by.items() if start <= step)


def _sequence(optimizer: Any, *, parts: int = 2) -> Any:
    made = [torch_schedules.MultiStepLR(optimizer, [2 * n + 2, 40], gamma=0.5) for n in range(parts)]
    return torch_schedules.SequentialLR(optimizer, made, milestones=[4 * n + 4 for n in range(parts - 1)])


SCHEDULES = {
    "MultiStepLR": lambda o: torch_schedules.MultiStepLR(o, [4, 6]),
    "SequentialLR": _sequence,
    "ChainedScheduler": lambda o: torch_schedules.ChainedScheduler(
        [torch_schedules.MultiStepLR(o, [4]), torch_schedules.ExponentialLR(o, 0.9)]
    ),
    "LambdaLR": lambda o: torch_schedules.LambdaLR(o, _Factor()),
    "OneCycleLR": lambda o: torch_schedules.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: torch_schedules.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 3),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=5),
}
CLIENT = {
    **{"best": float("nan"), 7: (1, 2), "seen": {3, 4}, "counts": Counter({5: 1}), "raw": b"\0", "np": np.float32(1.5)},
    "tensor": torch.arange(3),
}


def _schedules(folder: str) -> None:
    for name, make in SCHEDULES.items():
        engine = _engine(make)
        _train(engine, 3)
        engine.save_checkpoint(folder, name, CLIENT)
        expected = _train(engine, 6)
        assert len(set(expected)) > 1, name
        again = _engine(make)
        _, client = again.load_checkpoint(folder, name)
        assert _train(again, 6) == expected, name
    assert repr(client) == repr(CLIENT) and type(client["np"]) is np.float32
    assert client.keys() == CLIENT.keys()


def test_schedules_and_the_callers_values_come_back_with_their_types(ranks, tmp_path):
    ranks(1).run(_schedules, str(tmp_path))


def _refused(folder: str) -> None:
    engine = _engine(lambda o: _sequence(o, parts=3))
    _train(engine, 3)
    engine.save_checkpoint(folder, "three")
    other = _engine(_sequence)
    _train(other, 2)
    before = _values(other)
    with pytest.raises(dsgraph.CheckpointError, match="SequentialLR, does not fit the engine's SequentialLR"):
        other.load_checkpoint(folder, "three")
    for value, old in zip(_values(other), before, strict=True):
        assert torch.equal(value, old) if isinstance(value, torch.Tensor) else value == old
    names = sorted(path.name for path in Path(folder).iterdir())
    for tag, client, said in [
        ("latest", {}, "tag 'latest': the file 'latest' names the newest"),
        (0, [1], "client_state is a list; expected a dict"),
        (0, {"f": print}, r"client_state\['f'\] is a builtin_function_or_method"),
    ]:
        with pytest.raises(dsgraph.CheckpointError, match=said):
            engine.save_checkpoint(folder, tag, client)
    engine.optimizer.param_groups[0]["made_by"] = engine
    with pytest.raises(dsgraph.CheckpointError, match="'made_by' of the optimizer is a Engine"):
        engine.save_checkpoint(folder, "a")
    del engine.optimizer.param_groups[0]["made_by"]
    state = next(iter(engine.optimizer.state.values()))
    state["factors"] = [torch.ones(2)]
    with pytest.raises(dsgraph.CheckpointError, match=r"'factors' of .* is a list with tensors"):
        engine.save_checkpoint(folder, "a")
    assert sorted(path.name for path in Path(folder).iterdir()) == names
    del state["factors"]
    engine.save_checkpoint(folder, 0)
    assert _engine(lambda o: _sequence(o, parts=3)).load_checkpoint(folder, 0)[0] == f"{folder}/0"


def test_what_cannot_be_kept_or_taken_is_refused_and_changes_nothing(ranks, tmp_path):
    ranks(1).run(_refused, str(tmp_path))


def test_an_engine_that_writes_nothing_closes_after_the_process_group(one_rank):
    engine = _engine()
    dist.destroy_process_group()
    try:
        engine.wait_for_checkpoint()
        engine.close()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the fixture to destroy


def _pipeline(seed: int) -> dsgraph.Engine:
    torch.manual_seed(seed)
    settings = {
        **{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "parallel": {"pp": 2}},
        **{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "dsgraph": {"compile": False}},
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), _Squared(4, 4))
    return dsgraph.initialize(model=model, config=settings, example=(torch.ones(2, 4),))[0]


def _stages_saved_beside_training(folder: str) -> None:
    engine, other = _pipeline(0), _pipeline(1)
    batches = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    engine.train_batch(iter(batches[:2]))
    saved = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.save_checkpoint(folder, 1, asynchronous=True)
    expected = [float(engine.train_batch(iter(batches[at : at + 2]))) for at in (2, 4)]
    engine.wait_for_checkpoint()
    assert other.load_checkpoint(folder, load_module_only=True)[0] == f"{folder}/1" and other.global_steps == 0
    assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items())
    assert not other.optimizer.state
    other.load_checkpoint(folder)
    assert other.global_steps == 1
    assert [float(other.train_batch(iter(batches[at : at + 2]))) for at in (2, 4)] == expected
    engine.close()
    other.close()


def test_stages_are_saved_while_they_train_on(ranks, tmp_path):
    ranks(2).run(_stages_saved_beside_training, str(tmp_path))
