"""Buffers that a forward writes, in stages on gloo ranks against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import dsgraph
from dsgraph.parallel.pipeline.schedule_order import SCHEDULES
from dsgraph.parallel.pipeline.stage_chain import NO_TECHNIQUES, Techniques
from dsgraph.passes.errors import PassError

pytestmark = pytest.mark.distributed

COUNT, ROWS, WIDTH = 4, 8, 8


class Block(nn.Module):
    """A residual block with running statistics, an average that its backward reads, and a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        before, h = self.average.clone(), self.norm(self.linear(x))
        if self.training:
            self.average.mul_(0.9).add_(h.detach().square().mean(0), alpha=0.1)
            self.calls += 1
            self.last = self.last * 0.5 + h.detach().amax(0)
        h = h * (1 + before)
        return x + torch.sin(h * self.average) + 0.1 * torch.sqrt(self.last.abs() + 1) * torch.tanh(h)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.blocks[0].average.abs()  # of the micro-batches before, also in the last stage
        for block in self.blocks:
            x = block(x)
        return self.head(x * scale).square().mean()


def _rows(step: int, dp: int = 1) -> Tensor:
    return torch.randn(dp * COUNT * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def _of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _all_tensors(piped: dsgraph.PipelinedModel) -> dict[str, Tensor]:
    return {name: value for part in _of_all(piped.state_dict()) for name, value in part.items()}


def _against_one_process(schedule: str, options: dict[str, Any] | None, techniques: Techniques = NO_TECHNIQUES) -> None:
    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    alone = copy.deepcopy(model)
    piped = dsgraph.pipeline(
        *(model, mesh, (_rows(0)[:ROWS],)),
        schedule=schedule,
        microbatches=COUNT,
        options=options,
        techniques=techniques,
    )
    held = dict(piped.state_dict())
    assert all(not held[name].any() for name in held if name.endswith(("average", "last", "calls", "mean")))
    expected = dict(alone.named_parameters())
    for step in range(3):
        wanted = torch.zeros(())
        alone.train()
        for rows in _rows(step).chunk(COUNT):
            loss = alone(rows) / COUNT
            loss.backward()
            wanted += loss.detach()
        torch.testing.assert_close(piped.step(_rows(step)), wanted, rtol=1e-6, atol=0)
        for name, value in piped.named_parameters():
            torch.testing.assert_close(value.grad, expected[name].grad, rtol=1e-5, atol=1e-6)
        found = _all_tensors(piped)
        for name, value in alone.named_buffers():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
        assert int(found["blocks.3.norm.num_batches_tracked"]) == int(found["blocks.0.calls"]) == COUNT * (step + 1)
        with torch.no_grad():
            wanted = sum(alone.eval()(rows) for rows in _rows(10).chunk(COUNT)) / COUNT
        torch.testing.assert_close(piped.evaluate(_rows(10)), wanted, rtol=1e-6, atol=0)


_COVERING = {("1F1B", "eager"), ("ZBVZeroBubble", None), ("GPipe", "limit")}
_OPTIONS: dict[str | None, dict[str, Any] | None] = {
    "eager": {"codegen": "eager"},
    None: None,
    "limit": {"codegen": "eager", "memory_limit": "17kB"},
}


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param(schedule, options, marks=() if (schedule, options) in _COVERING else pytest.mark.full)
        for schedule in SCHEDULES
        for options in _OPTIONS
        if options != "limit" or schedule in ("1F1B", "GPipe")
    ],
)
def test_buffers_are_those_of_one_process_after_each_step(ranks, schedule, options):
    ranks(2).run(_against_one_process, schedule, _OPTIONS[options])


def test_blocks_with_graphs_of_their_own_write_as_well(ranks):
    ranks(2).run(_against_one_process, "1F1B", {"codegen": "eager"}, Techniques(blocks="auto"))


def _checkpoint(folder: str) -> None:
    """Each of two copies has statistics of its own rows; a checkpoint has those of the first one."""
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    given = (mesh["pp"], (_rows(0)[:ROWS],))
    piped = dsgraph.pipeline(model, *given, microbatches=COUNT, data_parallel=mesh["dp"], zero_stage=1)
    parts = _rows(0, dp=2).chunk(2)
    piped.step(parts[mesh["dp"].get_local_rank()])
    for rows in parts[0].chunk(COUNT):
        alone(rows)
    expected, found = dict(alone.named_buffers()), piped.state_dict()
    here = [name for name in expected if name in found and name.endswith("mean")]
    is_first = mesh["dp"].get_local_rank() == 0
    assert here and all(torch.allclose(found[name], expected[name], atol=1e-7) == is_first for name in here)
    piped.save_checkpoint(folder)
    other = dsgraph.pipeline(
        Model(), init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "pp"))["pp"], given[1], microbatches=COUNT
    )
    other.load_checkpoint(folder)
    for name, value in other.state_dict().items():
        if name in expected and not name.endswith("calls"):
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def test_a_checkpoint_has_the_statistics_of_the_first_copy(ranks, tmp_path):
    ranks(4).run(_checkpoint, str(tmp_path))


class Writes(nn.Module):
    """Writes to one of its tensors in a way that stages cannot follow."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers, self.way = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), way
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.way == "early and late":
                torch.lerp(self.average, x.detach().mean(0), 0.1, out=self.average)
            x = torch.tanh(layer(x)) + self.average
        if self.way == "gradient":
            self.average = self.average * 0.9 + x.mean(0)
        if self.way == "shape":
            self.average = x.detach()
        if self.way == "parameter":
            self.layers[0].weight.data.mul_(0.9)
        return x.square().mean()


def _refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for way, problem in {
        "gradient": r"gives buffer 'average' a value with a gradient, .*: detach\(\) it",
        "shape": r"assigns torch.float32 of shape \(8, 8\) to buffer 'average', which is torch.float32 of shape \(8,\)",
        "parameter": "writes to parameter 'layers.0.weight'",
    }.items():
        with pytest.raises(dsgraph.PartitionError, match=problem):
            dsgraph.pipeline(Writes(way), mesh, (_rows(0)[:ROWS],), microbatches=COUNT)
    given = (Writes("early and late"), mesh, (_rows(0)[:ROWS],))
    with pytest.raises(PassError, match="writes to 'average', and one stage must have all that writes to it"):
        dsgraph.pipeline(*given, microbatches=COUNT, split=["layers.2"])
    names = _of_all(list(dsgraph.pipeline(*given, microbatches=COUNT).state_dict()))
    assert ["average" in each for each in names] == [True, False], "the loss is a stage of its own"


def test_what_one_stage_cannot_own_is_refused_by_name(ranks):
    ranks(2).run(_refusals)
