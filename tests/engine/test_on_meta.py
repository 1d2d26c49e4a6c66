"""`initialize` of a model on the meta device: it gets values where they are to lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dsgraph
from dsgraph.engine import on_meta
from dsgraph.offload.stored_rows import stored_rows
from dsgraph.utils.errors import ConfigError, PartitionError
from tests.distributed.training import full

from .memory import Grown
from .training import config

pytestmark = pytest.mark.distributed


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.Linear(64, 40, bias=False))


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _model()


def _engine(model: nn.Module, folder: str, *, disk: bool, **more: Any) -> dsgraph.Engine:
    torch.compiler.reset()
    settings = config(3)
    settings["zero_optimization"] |= {"stage3_param_persistence_threshold": 12}
    if disk:
        place = {"device": "nvme", "nvme_path": folder}
        settings["zero_optimization"] |= {"offload_optimizer": place, "offload_param": place}
    return dsgraph.initialize(model=model, config=settings, **more)[0]


def _train(engine: dsgraph.Engine) -> list[torch.Tensor]:
    for number in range(2):
        torch.manual_seed(number + dist.get_rank())
        engine.backward(engine(torch.randn(4, 48)).square().mean())
        engine.step()
    return [full(param.detach()) for param in engine.module.parameters()]


def _same(place: str) -> None:
    torch.manual_seed(3)
    usual = _engine(_model(), place, disk=False)
    usual.export(f"{place}/weights")
    dist.barrier()
    torch.manual_seed(3)
    drawn = _engine(_on_meta(), place, disk=True)
    torch.manual_seed(4 + dist.get_rank())
    read = _engine(_on_meta(), place, disk=True, weights=f"{place}/weights")
    over = _engine(_on_meta(), place, disk=True)
    over.load_pretrained(f"{place}/weights")
    rows = next(drawn.module.parameters()).to_local()
    assert stored_rows(rows) is not None
    expected = _train(usual)
    for engine in (drawn, read, over):
        for mine, theirs in zip(_train(engine), expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.full)])
def test_numbers_are_those_of_a_model_that_was_in_memory(ranks, tmp_path, world):
    ranks(world).run(_same, str(tmp_path))


def test_what_it_took_is_printed_with_a_bar(one_rank, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(on_meta, "MOMENT", 0.0)
    _engine(_on_meta(), str(tmp_path), disk=True)
    out, err = capfd.readouterr()
    assert "MB of memory above the" in out and "initialising 0.0 million parameters took" in out
    assert f"dsgraph: initialising [{'#' * 40}]" in err
    monkeypatch.setattr(on_meta, "MOMENT", 60.0)
    _engine(_on_meta(), str(tmp_path), disk=True)
    assert "[" not in capfd.readouterr().err


def _takes_a_few_tensors(_: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    width, depth = 1024, 12
    make = lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))  # noqa: E731
    _engine(make(), "", disk=False).export(f"{folder}/weights")
    with torch.device("meta"):
        models = [make() for _ in range(3)]
    found, again = [], []
    for model in models:  # what torch loads for that, it loads once; what else the process does only adds to a reading
        with Grown() as reading:
            engine = _engine(model, folder, disk=True, weights=f"{folder}/weights")
        found.append(reading.bytes)
    each = 4 * width * width
    assert min(found) < 8 * each, f"{found} bytes of {4 * depth * each} were in memory at once"
    for _ in models:
        with Grown() as reading:
            engine.load_pretrained(f"{folder}/weights")
        again.append(reading.bytes)
    assert min(again) < 8 * each, f"{again} bytes of {depth * each} were in memory at once"
    dist.destroy_process_group()


def test_reading_weights_takes_a_few_tensors_of_memory(tmp_path):
    """In a process of its own: how much memory another test has left to be used again is not known."""
    torch.multiprocessing.spawn(_takes_a_few_tensors, (str(tmp_path),))


def test_an_optimizer_of_the_model_on_meta_gets_the_shards(one_rank, tmp_path):
    model = _on_meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = _engine(model, str(tmp_path), disk=True, optimizer=optimizer)
    before = [full(param.detach()).clone() for param in engine.module.parameters()]
    after = _train(engine)
    assert not any(torch.equal(mine, theirs) for mine, theirs in zip(after, before, strict=True))


def test_weights_that_cannot_be_read_are_refused(one_rank, tmp_path):
    with pytest.raises(ConfigError, match=r"weights is for a model on the meta device.*load_pretrained"):
        _engine(_model(), str(tmp_path), disk=True, weights=tmp_path)
    with pytest.raises(PartitionError, match=r"rank 0: weights: there are no \*.safetensors"):
        _engine(_on_meta(), str(tmp_path), disk=True, weights=tmp_path)
    _engine(nn.Sequential(nn.Linear(48, 60)), "", disk=False).export(tmp_path / "other")
    with pytest.raises(PartitionError, match=r"'0.weight' is \[60, 48\] in .* and \[64, 48\] in the model"):
        _engine(_on_meta(), str(tmp_path), disk=True, weights=tmp_path / "other")
    _engine(nn.Sequential(nn.Linear(48, 64)), "", disk=False).export(tmp_path / "less")
    with pytest.raises(PartitionError, match=r"there is no '1.weight' in .*less, which the model has"):
        _engine(_on_meta(), str(tmp_path), disk=True, weights=Path(tmp_path / "less"))
    settings = {**config(3), "parallel": {"tp": 2}}
    with pytest.raises(ConfigError, match="takes no model on the meta device yet"):
        dsgraph.initialize(model=_on_meta(), config=settings)
