"""A model that calls `torch.compiler.nested_compile_region` itself: dsgraph writes its regions out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsgraph
from tests.distributed.training import compare
from tests.models import tokens

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo captures no region that reads a sharded parameter"),
]


class _Block(nn.Module):
    """A block that is a region, with a checkpoint inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + checkpoint(self._part, x, use_reentrant=False)

    def _part(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(self.norm(x)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), targets.flatten())


def _learn(stage: int, micro_batches: int, codegen: str) -> None:
    compare(_Net, tokens, stage=stage, micro_batches=micro_batches, codegen=codegen, blocks="none", evaluate=True)


@pytest.mark.parametrize(
    ("stage", "micro_batches", "codegen"),
    [
        (3, 1, "eager"),
        pytest.param(1, 2, "eager", marks=pytest.mark.full),
        pytest.param(3, 2, "inductor", marks=[pytest.mark.full, pytest.mark.inductor]),
    ],
)
def test_regions_of_a_model_learn_as_in_one_process(ranks, stage, micro_batches, codegen):
    ranks(2).run(_learn, stage, micro_batches, codegen)


def test_a_region_that_is_written_out_is_told(one_rank):
    model = dsgraph.partition(_Net(), stage=3, keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    compiled(*tokens(0, 0)).backward()
    notes = [(item.pass_name, item.note) for item in dsgraph.report(compiled).near_misses]
    assert ("inline_regions", "region subgraph_0 is written out: its calls are part of the graph") in notes
