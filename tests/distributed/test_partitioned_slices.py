"""Tensor-parallel models that are partitioned: ZeRO shards the rows of each slice."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh
from torch.nn.utils import clip_grad_norm_

import dsgraph
from dsgraph.optim.full_matrix import whole_where_needed
from dsgraph.utils.errors import PartitionError
from tests.distributed.training import compare, full
from tests.models import CASES

pytestmark = pytest.mark.distributed


class Layers(nn.Module):
    """Products by columns and by rows, of sizes that ranks cannot share evenly, and a norm that stays replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 10), nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x)))).square().mean()


def _features(step: int, rank: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + rank)),)


MODELS: dict[str, tuple[Any, Any]] = {
    "layers": (Layers, _features),
    "gpt": (CASES["gpt"].build, CASES["gpt"].batches),
    "dropout": (CASES["dropout"].build, CASES["dropout"].batches),
}


def _compare(model: str, **how: Any) -> None:
    build, batches = MODELS[model]
    compare(build, batches, tp=2, blocks=None, steps=2, evaluate=True, **how)


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("codegen", (None, "eager"))
@pytest.mark.parametrize("micro_batches", (1, 2))
def test_trains_as_one_process(ranks, model, stage, codegen, micro_batches):
    ranks(4).run(_compare, model, stage=stage, codegen=codegen, micro_batches=micro_batches)


@pytest.mark.full
@pytest.mark.inductor
@pytest.mark.parametrize("stage", (1, 3))
def test_generated_code_trains_as_one_process(ranks, stage):
    ranks(4).run(_compare, "gpt", stage=stage, codegen="inductor")


def _mesh() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _made(stage: int) -> tuple[nn.Module, nn.Module]:
    """Return a partitioned tensor-parallel model, and the same model in one process."""
    torch.manual_seed(0)
    alone, mesh = Layers(), _mesh()
    model = Layers()
    model.load_state_dict(alone.state_dict())
    dsgraph.tensor_parallel(model, mesh["tp"], example_inputs=_features(0, 0))
    dsgraph.partition(model, mesh["dp"], stage=stage, keep_whole_below=0)
    return model, alone


def _read_and_write(stage: int) -> None:
    model, alone = _made(stage)
    names = {name: tuple(param.shape) for name, param in alone.named_parameters()}
    assert {name: tuple(param.shape) for name, param in model.named_parameters()} == names
    share = {0: 1, 3: 2}[stage] * 2
    assert model._parameters == {} and model.up._parameters["weight"].to_local().numel() <= 84 // share
    assert torch.equal(model.up.weight.clone(), alone.up.weight)
    seen: list[Tensor] = []
    model.down.weight.register_hook(lambda grad: seen.append(grad.clone()))
    for each in (model, alone):
        each(*_features(0, 0)).backward()
        clip_grad_norm_(each.parameters(), 0.01)
    torch.testing.assert_close(full(model.down.weight.grad), alone.down.weight.grad)
    assert seen[0].shape == (7, 10)
    with torch.no_grad():
        model.up.weight.mul_(2)
        alone.up.weight.mul_(2)
    for (name, mine), theirs in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
        assert torch.equal(full(mine), theirs), name
    other = Layers().state_dict()
    for values in other.values():
        dist.broadcast(values, 0)
    model.load_state_dict(other)
    for name, mine in model.state_dict().items():
        assert torch.equal(full(mine), other[name]), name


@pytest.mark.parametrize("stage", (pytest.param(0, marks=pytest.mark.full), 3))
def test_parameters_are_full_to_users(ranks, stage):
    ranks(4).run(_read_and_write, stage)


def _again_with_an_adapter() -> None:
    """Two models of one process, each with a mesh of its own: torch returns the first of equal meshes."""
    for _ in range(2):
        model, _ = _made(stage=3)
        torch.manual_seed(dist.get_rank())
        model.norm = nn.Sequential(nn.Linear(7, 7), model.norm)
        dsgraph.partition(model)
        compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
        compiled(*_features(0, 0)).backward()
        added, old = model.norm[0]._parameters["weight"], model.up._parameters["weight"]
        held: list[Any] = [None] * 4
        dist.all_gather_object(held, (full(added).detach(), full(old.grad)))
        assert all(torch.equal(one, other) for each in held for one, other in zip(each, held[0], strict=True))


def test_a_second_model_and_new_parameters_are_equal_on_all_ranks(ranks):
    ranks(4).run(_again_with_an_adapter)


def _refuse() -> None:
    mesh = _mesh()
    sliced = partial(dsgraph.tensor_parallel, mesh=mesh["tp"], example_inputs=_features(0, 0))
    model = sliced(Layers())
    for given, message in (
        (None, r"the model is tensor-parallel: pass mesh="),
        (
            mesh["tp"],
            r"mesh has ranks \[\d, \d\], and the model is tensor-parallel over ranks \[\d, \d\]: pass the ranks",
        ),
    ):
        with pytest.raises(PartitionError, match=message):
            dsgraph.partition(model, given, stage=1)
    model(*_features(0, 0)).backward()
    with pytest.raises(PartitionError, match=r"parameter 'up.weight' has a gradient or hooks"):
        dsgraph.partition(model, mesh["dp"], stage=1)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(PartitionError, match="SGD was made before partition"):
        dsgraph.partition(model, mesh["dp"], stage=1)
    del optimizer
    assert float(model(*_features(0, 0))) > 0, "it is as it was"
    dsgraph.partition(model, mesh["dp"], stage=0)
    matrices = [param for param in model.parameters() if param.dim() == 2]
    with pytest.raises(PartitionError, match=r"contains 'up.weight', of which each tensor-parallel rank has a slice"):
        torch.optim.Muon(matrices).step()
    with pytest.raises(PartitionError, match="no rank that could compute with a tensor-parallel parameter of shape"):
        whole_where_needed(torch.optim.Muon(matrices))


def test_what_is_not_supported_is_refused_and_nothing_is_changed(ranks):
    ranks(4).run(_refuse)


def _report() -> str:
    build, batches = MODELS["gpt"]
    mesh, model = _mesh(), build()
    dsgraph.tensor_parallel(model, mesh["tp"], example_inputs=batches(0, 0))
    dsgraph.partition(model, mesh["dp"], stage=3, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    compiled(*batches(0, mesh.get_local_rank("dp"))).backward()
    return str(dsgraph.report(compiled))


def test_the_report_names_replicated_fused_slices(ranks):
    said = ranks(4).run(_report)[0]
    assert re.search(r"fused of 3 tensor-parallel parts", said), said
