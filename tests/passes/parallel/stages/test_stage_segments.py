"""`segments_of`: a stage's graph, cut at its repeated blocks; equal blocks are alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dsgraph.parallel.pipeline.captured_model import capture_model
from dsgraph.parallel.pipeline.stage_chain import StageChain, check_droppable
from dsgraph.passes.parallel.stages.split_stages import SplitStages
from dsgraph.passes.parallel.stages.stage_graphs import StageGraph, stage_graphs
from dsgraph.passes.parallel.stages.stage_segments import segments_of
from dsgraph.utils.errors import OptionError


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        mask = torch.arange(4) < 3  # each stage computes it
        return x + torch.tanh(self.inner(x + shift)) * mask


class _Model(nn.Module):
    def __init__(self, block: type[nn.Module] = _Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, shift = self.first(x), torch.linspace(0, 1, 4)
        for block in self.blocks:
            x = block(x, shift)
        return self.head(x).square().mean()


_PATHS = ("blocks.0", "blocks.1", "blocks.2")


def _stages(model: nn.Module, count: int = 1, split: str = "auto") -> list[StageGraph]:
    captured = capture_model(model, (torch.ones(2, 3),), kwargs={}, device=torch.device("cpu"))
    graph = captured.graph_module
    plan = SplitStages(count, split if split == "auto" else [split]).plan(
        graph.graph, captured.costs, captured.repeated
    )
    return stage_graphs(graph, plan, state=captured.state, results=captured.results, repeated=captured.repeated)


def test_blocks_are_segments_and_equal_ones_are_alike():
    (stage,) = _stages(_Model())
    segments = segments_of(stage, _PATHS)
    assert [segment.block for segment in segments] == ["", *_PATHS, ""]
    blocks = segments[1:4]
    assert len({segment.likeness for segment in blocks}) == 1 and blocks[0].likeness != segments[-1].likeness
    assert blocks[1].state == ("blocks.1.inner.weight", "blocks.1.inner.bias")
    assert [segment.hidden for segment in blocks] == [segments[0].gives[0], blocks[0].gives[0], blocks[1].gives[0]]
    other = _Model()
    other.blocks[1].inner = nn.Linear(4, 4, bias=False)
    kinds = [segment.likeness for segment in segments_of(_stages(other)[0], _PATHS)[1:4]]
    assert kinds[0] == kinds[2] != kinds[1]
    frozen = _Model()
    frozen.blocks[1].inner.requires_grad_(False)
    kinds = [segment.likeness for segment in segments_of(_stages(frozen)[0], _PATHS)[1:4]]
    assert kinds[0] == kinds[2] != kinds[1]


def test_a_chain_computes_what_the_stage_does_and_leaves_blocks_out():
    model, x = _Model(), torch.randn(2, 3)
    (stage,) = _stages(model)
    chain = StageChain(stage, _PATHS)
    assert torch.equal(chain(x)[0], model(x))
    chain.keeps = {"blocks.0": 1.0, "blocks.1": 0.0, "blocks.2": 0.5}
    hidden, shift = model.blocks[0](model.first(x), torch.linspace(0, 1, 4)), torch.linspace(0, 1, 4)
    hidden = hidden + 2 * (model.blocks[2](hidden, shift) - hidden)
    expected = model.head(hidden).square().mean()
    (found,) = chain(x)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert model.blocks[1].inner.weight.grad is None and model.blocks[2].inner.weight.grad is not None


class _Written(_Block):
    """The hidden states are written to, so no cut is possible in front of the block."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x += torch.tanh(self.inner(x + shift))
        return x


class _Early(_Block):
    """The rest of the block is one piece with other hidden states."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        x += 1
        return super().forward(x, shift)


class _Two(_Block):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        shift += 0 * x.sum()
        return super().forward(x, shift)


@pytest.mark.parametrize("kind", [_Written, _Early, _Two])
def test_blocks_that_cannot_be_cut_are_not_left_out(kind):
    model, x = _Model(kind), torch.randn(2, 3)
    (stage,) = _stages(model)
    assert torch.equal(StageChain(stage, _PATHS)(x)[0], model(x))
    for path in _PATHS:
        with pytest.raises(OptionError, match=rf"block '{path}' cannot be left out: it must be one piece"):
            check_droppable([stage], [path])


def test_a_block_of_two_stages_is_not_left_out():
    check_droppable(_stages(_Model(), 2, split="blocks.1"), _PATHS)
    with pytest.raises(OptionError, match=r"block 'blocks\.1' is in 2 stages"):
        check_droppable(_stages(_Model(), 2, split="blocks.1.inner"), _PATHS)
