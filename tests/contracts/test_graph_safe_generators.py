"""Generators as inputs of graphs: on CUDA alone torch repeats random ops of checkpoint regions by them.

Torch's own functions are made to do it on the CPU. What it does with the graphs after our passes needs a device with a
number, and fails without one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._functorch.partitioners as partitioners
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import dsgraph

WIDTH = 64


class _Block(nn.Module):
    """A random op that Inductor leaves as it is, in the middle of what is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(x))[:, torch.randperm(WIDTH)])


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@pytest.fixture
def graphs(monkeypatch) -> list[tuple[GraphModule, GraphModule]]:
    """The graphs, forward and backward, to which torch gives generators."""
    found: list[tuple[GraphModule, GraphModule]] = []
    usual = partitioners.apply_graphsafe_rng_functionalization

    def apply(forward: GraphModule, backward: GraphModule, one: Any, other: Any, device: Any, *rest: Any) -> Any:
        found.append((forward, backward))
        return usual(forward, backward, one, other, torch.device("cpu", 0), *rest)

    monkeypatch.setattr(partitioners, "apply_graphsafe_rng_functionalization", apply)
    monkeypatch.setattr(partitioners, "supports_graphsafe_rng", lambda device: True)
    monkeypatch.setattr(partitioners, "get_default_generator", lambda device: torch.default_generator)
    return found


@pytest.mark.inductor  # traces for it
@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.skipif(not hasattr(partitioners, "supports_graphsafe_rng"), reason="this torch asks for a CUDA device")
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (3, {"activation_offload": "host", "memory_limit": "4 MiB"})])
def test_passes_take_graphs_with_generators(graphs, stage, options):
    model = dsgraph.partition(_Net(), stage=stage, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options=options)
    with pytest.raises(Exception, match="graphsafe_rng_state_index must not be None"):
        compiled(torch.randn(16, WIDTH))
    assert len(graphs) == 2, "one pair for each of the two blocks"
    for graph in graphs[0]:
        generators = [node for node in graph.graph.find_nodes(op="placeholder") if "rng_state" in node.name]
        assert [type(node.meta["val"]) for node in generators] == 2 * [torch.Generator]
        repeats = graph.graph.find_nodes(op="call_function", target=torch._prims.rng_prims.graphsafe_run_with_rng_state)
        assert [node.kwargs["rng_state"] for node in repeats] == generators
