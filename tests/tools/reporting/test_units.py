"""A training step with repeated blocks, as the report shows it: units, plan and predicted memory."""

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


def test_a_step_is_a_sequence_of_units(fake_ranks):
    report = report_of()
    layers, head = report.units
    assert layers.modules == tuple(f"body.layers.{number}" for number in range(LAYERS))
    (compiled, _) = (item.number for item in report.compiles if item.kind == "training")
    assert (layers.graphs, layers.recompiles) == (((compiled,),), 0)
    assert layers.parameters == tuple(f"body.layers.*.{name}" for name in ("up.weight", "up.bias", "down.weight"))
    assert (head.modules, head.parameters, head.is_planned) == (("",), ("head.weight",), False)
    assert layers.is_planned and layers.copy_bytes == 2 * SQUARE
    assert [(item.count, item.sent_bytes) for item in layers.gather] == [(2, 2 * SQUARE * 7 // 8)]
    kinds = {item.kind: (item.count, item.sent_bytes) for item in layers.reduction}
    assert kinds == {"reduce_scatter_tensor": (2, 2 * SQUARE * 7 // 8), "all_reduce": (1, 4 * WIDTH * 2 * 7 // 8)}
    assert (report.plan.blocks, report.plan.kept, report.plan.kept_bytes) == (LAYERS, "body.layers.2", 2 * SQUARE)
    assert (report.plan.gathers_ahead, report.plan.exceptions) == (True, ())
    text = " ".join(str(report).split())
    assert f"body.layers.0 ... body.layers.2 (3) 3 {compiled} " in text
    assert "uncompiled code between the units: forward (" in text
    assert "parameters read outside graphs: body.embedding.weight" in text
    assert "parameters are gathered while units before them compute" in text


def test_a_model_of_one_graph_has_no_sequence(fake_ranks):
    report = report_of(blocks="none")
    assert [unit.modules for unit in report.units] == [("",)]
    assert report.plan is None and "a training step runs" not in str(report)


def test_the_plan_says_what_it_leaves_out_and_why(fake_ranks):
    def watch(model):
        model.body.layers[0].up.bias.register_hook(lambda grad: grad)

    report = report_of(Model(checkpointed=(1,)), prepare=watch, overlap_comm=False)
    assert [unit.modules for unit in report.units if unit.is_block] == [("body.layers.0", "body.layers.2")]
    assert not report.plan.gathers_ahead
    idle, hooked = report.plan.exceptions
    assert idle.what == "body.layers.1" and "in the graph of their caller" in idle.reason
    assert hooked.what == "body.layers.0.up.bias" and "hook" in hooked.reason
    assert "of overlap_comm=False" in " ".join(str(report).split())


def test_steps_that_leave_the_graph_of_the_step_are_told(fake_ranks):
    model = dsgraph.partition(Model(), stage=3, keep_whole_below=WIDTH + 1)
    compiled = torch.compile(model, backend="dsgraph", options=OPTIONS)
    for skipped in (set(), set(), {1}):
        model.body.skipped = skipped
        compiled(torch.zeros(2, 8, dtype=torch.long)).backward()
    (found,) = [item for item in dsgraph.report(model).plan.exceptions if item.what == "some steps"]
    assert "left the graph of the step: call 2 was not" in found.reason


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
