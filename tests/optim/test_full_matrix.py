"""Optimizers that need whole parameters, on shards."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import dsgraph
from dsgraph.optim.full_matrix import FullMatrixOptimizer
from tests.engine.training import CASE, alone_step, batches, check_parameters, config
from tests.models import build

pytestmark = pytest.mark.distributed

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}}}


class _Pair:
    """`Muon` of the configuration in one process, written out."""

    def __init__(self, model: torch.nn.Module) -> None:
        inside = {name: param for name, param in model.named_parameters() if param.dim() == 2 and "embed" not in name}
        outside = [param for name, param in model.named_parameters() if name not in inside]
        self.parts = [
            torch.optim.Muon(inside.values(), lr=1e-2, weight_decay=0.1),
            torch.optim.AdamW(outside, lr=1e-2, weight_decay=0.1, eps=1e-3),
        ]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def _check(stage: int, settings: dict, given, make_alone) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(CASE)
    settings = {**config(stage, gradient_clipping=0.0), **settings}
    optimizer = None if given is None else given(model.parameters())
    if optimizer is not None:
        del settings["optimizer"]
    engine, stepped, _, _ = dsgraph.initialize(model=model, optimizer=optimizer, config=settings)
    if given is not None:
        assert isinstance(stepped, FullMatrixOptimizer) == (stage > 0)
    alone = build(CASE)
    alone_optimizer = make_alone(alone)
    mine, everybody = batches(rank), [batches(other) for other in range(world)]
    for _ in range(4):
        engine.train_batch(mine)
        alone_step(alone, everybody, 1, 0.0)
        alone_optimizer.step()
        alone_optimizer.zero_grad()
        check_parameters(engine, alone, rtol=1e-5, atol=1e-5)
    engine.close()


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2)), 3])
def test_muon_steps_as_in_one_process(ranks, stage):
    ranks(2).run(_check, stage, MUON, None, _Pair)


def _adafactor(params):
    return torch.optim.Adafactor(params, lr=1e-2)


def _adafactor_alone(model):
    return _adafactor(model.parameters())


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_an_optimizer_of_the_caller_steps_as_in_one_process(ranks, stage):
    ranks(3).run(_check, stage, {}, _adafactor, _adafactor_alone)


def _engine(settings: dict) -> dsgraph.Engine:
    """An engine of a model of several matrices, so that each of two ranks owns some."""
    return dsgraph.initialize(model=build("gpt"), config=config(3, **settings))[0]


def _train(engine: dsgraph.Engine, first: int, count: int) -> list[float]:
    data = batches(0, first)  # the same on all ranks, however many there are
    return [float(engine.train_batch(data)) for _ in range(count)]


def _save(folder: str) -> list[float]:
    engine = _engine(MUON)
    _train(engine, 0, 3)
    engine.save_checkpoint(folder)
    owned = [engine.optimizer.owns(param) for param in engine.module.parameters()]
    states = [param in engine.optimizer.state for param in engine.module.parameters()]
    assert states == [is_mine is not False for is_mine in owned], "the state of a parameter is on its owner"
    assert False in owned and True in owned
    return _train(engine, 3, 3)


def _go_on(folder: str) -> list[float]:
    engine = _engine(MUON)
    engine.load_checkpoint(folder)
    return _train(engine, 3, 3)


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.full)])
def test_checkpoints_hold_the_state_of_owners(ranks, tmp_path, world):
    expected = ranks(2).run(partial(_save, str(tmp_path)))[0]
    assert ranks(world).run(partial(_go_on, str(tmp_path)))[0] == pytest.approx(expected, rel=1e-5)
