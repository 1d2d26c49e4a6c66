"""A checkpoint of one engine can be loaded by any other; damaged files are named."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from tests.engine.training import CASE, batches, config
from tests.models import build, tokens

pytestmark = pytest.mark.distributed

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}


def _engine(stage: int, **more) -> dsgraph.Engine:
    return dsgraph.initialize(model=build(CASE), config=config(stage, scheduler=WARMUP, **more))[0]


def _losses(engine: dsgraph.Engine, first: int, last: int) -> list[float]:
    """The same batches on every rank, so that losses do not depend on how many there are."""
    found = []
    for number in range(first, last):
        loss = engine(*tokens(number, 0))
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


def _save(folder: str, stage: int, more: dict, asynchronous: bool = False) -> list[float]:
    engine = _engine(stage, **more)
    _losses(engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"seen": 3}, asynchronous=asynchronous)
    losses = _losses(engine, 3, 5)
    engine.close()
    return losses


def _go_on(folder: str, stage: int, more: dict) -> tuple[list[float], dict, int]:
    engine = _engine(stage, **more)
    path, client = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step3")
    return _losses(engine, 3, 5), client, engine.global_steps


LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


@pytest.mark.parametrize(
    ("stages", "worlds", "more", "asynchronous"),
    [
        ((3, 1), (2, 3), {}, True),
        pytest.param((1, 2), (2, 2), LAMB, False, marks=pytest.mark.full),
        pytest.param((3, 3), (2, 2), {}, False, marks=pytest.mark.full),
        pytest.param((0, 3), (3, 1), {}, False, marks=pytest.mark.full),
        pytest.param((2, 2), (2, 1), FP16, True, marks=pytest.mark.full),
    ],
)
def test_another_stage_and_number_of_ranks_go_on_alike(ranks, tmp_path, stages, worlds, more, asynchronous):
    expected = ranks(worlds[0]).run(_save, str(tmp_path), stages[0], more, asynchronous)[0]
    losses, client, steps = ranks(worlds[1]).run(_go_on, str(tmp_path), stages[1], more)[0]
    assert losses == pytest.approx(expected, rel=1e-2 if "fp16" in more else 1e-5)
    assert client == {"seen": 3} and steps == 5


def _refusals(folder: str) -> None:
    engine = _engine(3)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert engine.load_checkpoint(folder) == (None, {}), "a first start"
    assert ("holds no checkpoint" in said.getvalue()) == (dist.get_rank() == 0)
    with pytest.raises(dsgraph.CheckpointError, match="there is no checkpoint 'mine'; known: none"):
        engine.load_checkpoint(folder, "mine")
    with pytest.raises(dsgraph.CheckpointError, match=r"tag '\.\./mine'"):
        engine.save_checkpoint(folder, "../mine")
    with pytest.raises(dsgraph.CheckpointError, match=r"client_state\['of'\] is a object, which a checkpoint"):
        engine.save_checkpoint(folder, client_state={"of": object()})
    _losses(engine, 0, 1)
    engine.save_checkpoint(folder, "good")
    engine.save_checkpoint(folder, "bad")
    if dist.get_rank() == 0:
        damaged = next(path for path in (Path(folder) / "bad").iterdir() if path.suffix == ".distcp")
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    dist.barrier()
    before = [param.detach().to_local().clone() for param in engine.module.parameters()]
    with pytest.raises(dsgraph.CheckpointError, match=r"file __\d_0.distcp is damaged or missing"):
        engine.load_checkpoint(folder)
    for param, old in zip(engine.module.parameters(), before, strict=True):
        assert param.to_local().equal(old), "nothing was changed"
    assert engine.load_checkpoint(folder, "good")[0] == str(Path(folder) / "good")
    engine.save_checkpoint(folder, "good")  # once more
    assert sorted(path.name for path in Path(folder).iterdir()) == ["bad", "good", "latest"]


def test_what_is_wrong_is_named_and_nothing_is_changed(ranks, tmp_path):
    ranks(2).run(_refusals, str(tmp_path))


def _plain(*sizes: int, **more: object) -> dsgraph.Engine:
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    return dsgraph.initialize(model=model, config=config(3, dsgraph={"compile": False}, **more))[0]


def _other_models(folder: str) -> None:
    _plain(4, 8, 8).save_checkpoint(folder)
    for sizes, message in [
        ((4, 6, 6), r"'0.weight' is \[8, 4\] in it, and \[6, 4\] in the model"),
        ((4, 8, 8, 8), "there is no '2.weight' in it, which the model has"),
        ((4, 8), "there is '1.weight' in it, which the model has not"),
    ]:
        with pytest.raises(dsgraph.CheckpointError, match=f"it is of another model: {message}"):
            _plain(*sizes).load_checkpoint(folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert _plain(4, 8).load_checkpoint(folder, load_module_only=True)[0]
    left = "the model has none of 1.weight, 1.bias, which stay there"
    assert (left in said.getvalue()) == (dist.get_rank() == 0)
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(dsgraph.CheckpointError, match="its optimizer is AdamW, and the engine's is SGD: load_module"):
        _plain(4, 8, 8, **sgd).load_checkpoint(folder)


def test_another_model_or_optimizer_is_named(ranks, tmp_path):
    ranks(2).run(_other_models, str(tmp_path))


def _save_for_ever(folder: str, started) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = _engine(3, dsgraph={"compile": False})
    engine.save_checkpoint(folder, "first")
    started.set()
    number = 0
    while True:
        number += 1
        engine.save_checkpoint(folder, f"tag{number}", client_state={"number": number})


def _load_latest(folder: str) -> str | None:
    return _engine(3, dsgraph={"compile": False}).load_checkpoint(folder)[0]


@pytest.mark.full  # test_checkpoint_folder.py has every moment of a kill
@pytest.mark.parametrize(
    "seconds", (0.13, *(pytest.param(seconds, marks=pytest.mark.full) for seconds in (0.05, 0.31)))
)
def test_a_kill_while_saving_leaves_the_one_before(ranks, tmp_path, seconds):
    spawn = multiprocessing.get_context("spawn")
    started = spawn.Event()
    process = spawn.Process(target=_save_for_ever, args=(str(tmp_path), started))
    process.start()
    assert started.wait(120)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    latest = (tmp_path / "latest").read_text().strip()
    assert json.loads((tmp_path / latest / "engine.json").read_text())["format"] == "dsgraph-engine-2"
    assert ranks(1).run(_load_latest, str(tmp_path)) == [str(tmp_path / latest)]


class _Counting(torch.optim.SGD):
    """Keeps what is no tensor."""

    kept: object = 0

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1 if self.kept == 0 else self.kept
        return super().step(closure)


def _odd_states(folder: str) -> None:
    def make() -> dsgraph.Engine:
        settings = config(1)
        del settings["optimizer"]
        return dsgraph.initialize(model=build(CASE), optimizer=lambda p: _Counting(p, lr=0.1), config=settings)[0]

    engine = make()
    _losses(engine, 0, 2)
    for state in engine.optimizer.state.values():
        state["count"] += dist.get_rank()
    engine.save_checkpoint(folder)
    again = make()
    again.load_checkpoint(folder)
    assert {state["count"] for state in again.optimizer.state.values()} == {2}, "of the first rank"
    for state in again.optimizer.state.values():
        state["rows"] = torch.ones(3)
    with pytest.raises(
        dsgraph.CheckpointError, match=r"state 'rows' of .* has shape \[3\], and the parameter, which is s"
    ):
        again.save_checkpoint(folder)
    engine.optimizer.kept = object()
    _losses(engine, 2, 3)
    with pytest.raises(dsgraph.CheckpointError, match=r"optimizer state 'count' of .* is a object, which"):
        engine.save_checkpoint(folder)
    more = _engine(1)
    more.optimizer.add_param_group({"params": []})
    with pytest.raises(dsgraph.CheckpointError, match="1 groups of parameters, and the optimizer 2"):
        more.load_checkpoint(folder)


def test_what_is_no_tensor_is_kept_or_refused(ranks, tmp_path):
    ranks(2).run(_odd_states, str(tmp_path))


def _amid_a_step(folder: str) -> None:
    engine = _engine(3, gradient_accumulation_steps=2)
    data = batches(0)
    engine.save_checkpoint(folder, "before")
    engine.backward(engine(*next(data)))
    with pytest.raises(dsgraph.CheckpointError, match="save_checkpoint between the micro-batches of a step"):
        engine.save_checkpoint(folder)
    engine.step()
    with pytest.raises(dsgraph.CheckpointError, match="save_checkpoint between the micro-batches of a step"):
        engine.save_checkpoint(folder)
    first = float(engine.backward(engine(*next(data))))
    engine.step()
    assert engine.optimizer.state
    engine.load_checkpoint(folder)
    assert engine.counts.micro == 0 and all(param.grad is None for param in engine.module.parameters())
    assert not engine.optimizer.state, "there was none yet"
    engine.save_checkpoint(folder)
    data = batches(0, 1)
    assert float(engine.backward(engine(*next(data)))) == first


def test_a_step_that_is_not_over_is_not_saved_and_given_up_for_a_checkpoint(ranks, tmp_path):
    ranks(1).run(_amid_a_step, str(tmp_path))
