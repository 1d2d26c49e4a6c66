"""Weight gradients that zero-bubble schedules compute later, on one stage without ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgraph.parallel.pipeline.captured_model import capture_model
from dsgraph.parallel.pipeline.stage_modules import StageModule
from dsgraph.passes.parallel.stages.split_stages import SplitStages
from dsgraph.passes.parallel.stages.stage_graphs import stage_graphs

CPU = torch.device("cpu")


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


class _Gram(_Layers):
    """A weight is also the input of its own product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(self.first.weight, self.first.weight).square().mean()


class _InPlace(_Layers):
    """Results of products are written to."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x), inplace=True)
        h = self.second(h)
        h += x
        h[..., :2] *= 0.5
        return h.square().mean()


class _Pooled(_Layers):
    """A product takes a vector."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).mean(0)).square().mean()


@pytest.mark.parametrize("options", (None, {"codegen": "eager"}))
@pytest.mark.parametrize("kind", (_Layers, _Gram, _InPlace, _Pooled))
def test_gradients_are_those_of_the_model(kind, options):
    torch.manual_seed(0)
    model = kind()
    alone, x = copy.deepcopy(model), torch.randn(3, 4)
    captured = capture_model(model, (x,), kwargs={}, device=CPU)
    plan = SplitStages(1).plan(captured.graph_module.graph, captured.costs)
    (graph,) = stage_graphs(captured.graph_module, plan, state=captured.state, results=captured.results)
    stage = StageModule(graph.module, graph.roots, single=True, defers=True)
    if options is not None:
        stage.compile_graph(options)
    for _ in range(2):
        stage(**dict.fromkeys(graph.roots, x)).backward()
        assert stage.queue is not None
        stage.queue.take()()
        alone(x).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, alone.get_parameter(name).grad, msg=name)
