from __future__ import annotations

import torch
from torch import nn

from dsgraph.compat.compiled import compile_again


class Loop(nn.Module):
    """A model whose forward Dynamo runs uncompiled, because a graph ends in its loop, until `is_plain`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.is_plain = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.is_plain:
                torch._dynamo.graph_break()
            x = layer(x)
        return x


class Other(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_methods_of_one_model_are_compiled_again_and_those_of_others_stay():
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm

    model, other, x = Loop(), Other(), torch.ones(2, 3)
    run, run_other = (torch.compile(each, backend=count) for each in (model, other))
    run(x), run_other(x)
    model.is_plain, before = True, len(graphs)
    compile_again(model)
    run_other(x)
    assert len(graphs) == before
    run(x)
    (graph,) = graphs[before:]
    assert sum(node.op == "call_function" for node in graph.graph.nodes) == 2
    torch._dynamo.reset()
