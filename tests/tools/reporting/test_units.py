"""A training step with repeated blocks, in the report: units, what its graph leaves out, predicted memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsgraph

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 32, 3
SQUARE = 4 * WIDTH * WIDTH  # bytes of a weight
OPTIONS = {"codegen": "eager"}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Body(nn.Module):
    """Layers in a loop, some of them in a checkpoint."""

    def __init__(self, checkpointed: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.checkpointed, self.skipped = checkpointed, set[int]()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number in self.skipped:
                continue
            x = checkpoint(layer, x, use_reentrant=False) if number in self.checkpointed else layer(x)
        return x


class Model(nn.Module):
    def __init__(self, checkpointed: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.body, self.head = Body(checkpointed), nn.Linear(WIDTH, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens)).square().mean()


def report_of(model=None, *, blocks="auto", prepare=lambda model: None, **options):
    model = dsgraph.partition(model or Model(), stage=3, keep_whole_below=WIDTH + 1, blocks=blocks)
    prepare(model)
    compiled = torch.compile(model, backend="dsgraph", options={**OPTIONS, **options})
    for _ in range(2):
        compiled(torch.zeros(2, 8, dtype=torch.long)).backward()
    return dsgraph.report(model)


def test_the_report_says_which_blocks_run_a_graph_and_what_the_step_keeps(fake_ranks):
    report = report_of()
    layers, head = report.units
    assert layers.modules == tuple(f"body.layers.{number}" for number in range(LAYERS))
    compiled, of_head = (item.number for item in report.compiles if item.kind == "training")
    assert (layers.graphs, head.graphs, head.modules) == (((compiled,),), ((of_head,),), ("",))
    text = " ".join(str(report).split())
    assert f"compile {compiled}, run 3 times in a step: by body.layers.0 ... body.layers.2 (3)" in text
    (step,) = (item for item in report.compiles if item.kind == "step")
    sent = {(part.where.split()[0], item.kind): item.sent_bytes for part in report.step.parts for item in part.traffic}
    around = (64 + 64) * WIDTH * 4 * 7 // 8  # the embedding and the head
    blocks = 2 * SQUARE * 7 // 8
    assert sent["forward", "all_gather_into_tensor"] == around + LAYERS * blocks
    assert sent["backward", "reduce_scatter_tensor"] == around + LAYERS * blocks
    assert sent["backward", "all_gather_into_tensor"] == LAYERS * blocks
    assert step.activations.kept_names == ("head.weight",)  # the last unit's
    assert "parameter read eagerly: body.embedding.weight" in text


def test_a_model_of_one_graph_is_one_unit(fake_ranks):
    report = report_of(blocks="none")
    assert [unit.modules for unit in report.units] == [("",)]
    assert "times in a step" not in str(report)


def outside_step(report):
    kinds = ("step left its graph", "block without a graph of its own", "gradient reduced at once")
    return [item for item in report.fallbacks if item.kind in kinds]


def test_the_report_says_what_the_graph_of_the_step_leaves_out_and_why(fake_ranks):
    assert not outside_step(report_of())
    torch._dynamo.reset()

    def watch(model):
        model.body.layers[0].up.bias.register_hook(lambda grad: grad)

    report = report_of(Model(checkpointed=(1,)), prepare=watch, overlap_comm=False)
    assert [unit.modules for unit in report.units if len(unit.modules) > 1] == [("body.layers.0", "body.layers.2")]
    idle, hooked = outside_step(report)
    assert idle.what == "body.layers.1" and "in the graph of its caller" in idle.reason
    assert hooked.what == "body.layers.0.up.bias" and "hook" in hooked.reason
    assert "prefetch_forward_gathers" not in {item.name for one in report.compiles for item in one.passes}


def test_steps_that_leave_the_graph_of_the_step_are_told(fake_ranks):
    model = dsgraph.partition(Model(), stage=3, keep_whole_below=WIDTH + 1)
    compiled = torch.compile(model, backend="dsgraph", options=OPTIONS)
    for skipped in (set(), set(), {1}):
        model.body.skipped = skipped
        compiled(torch.zeros(2, 8, dtype=torch.long)).backward()
    found, idle = outside_step(dsgraph.report(model))
    assert found.kind == "step left its graph" and "call 2 was not" in found.reason
    assert (idle.what, idle.count) == ("body.layers.1", 1)


def test_the_memory_of_a_step_counts_all_parameters_once(fake_ranks):
    report = report_of()
    shards = sum(item.bytes_here for item in report.parameters)
    parts = report.memory.parts
    assert (parts["parameters"], parts["optimizer state"]) == (shards, 2 * shards)
    assert parts["gradients"] <= shards
    # Two blocks are gathered, and the gradients of a third are reduced.
    assert parts["communication"] == 3 * 2 * SQUARE + 4 * WIDTH
    without = report_of(blocks="none").memory
    assert report.memory.peak == pytest.approx(without.peak, rel=0.1)


@pytest.mark.inductor
def test_the_memory_of_units_that_inductor_compiles_is_known(fake_ranks):
    with torch._inductor.config.patch(force_disable_caches=True):  # what comes from a cache has no prediction
        memory = report_of(codegen="inductor").memory
    assert memory is not None
    assert memory.peak == pytest.approx(report_of().memory.peak, rel=0.1)
