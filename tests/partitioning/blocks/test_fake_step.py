"""The memory of the code around blocks, from a step on fake tensors, in numbers that can be added up by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.partitioning.blocks.fake_step import around_blocks
from dsgraph.partitioning.state import partition_states

ROWS, WIDTH, CLASSES = 8, 16, 1000
ROW = 4 * ROWS


class _Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class _Model(nn.Module):
    def __init__(self, inner: tuple[int, ...] = (64, 64)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for width in inner)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def _around(model: nn.Module, x: Tensor):
    (state,) = partition_states(dsgraph.partition(model, stage=3, keep_whole_below=0))
    return around_blocks(model, state.parameters, (x,), {})


@pytest.mark.usefixtures("fake_ranks")
def test_what_exists_around_blocks_is_counted():
    model = _Model()
    found = _around(model, torch.randn(ROWS, WIDTH))
    batch, logits, head = ROW * WIDTH, ROW * CLASSES, 4 * CLASSES * WIDTH
    assert found.calls == 2 and set(found.in_flight.values()) == {2}
    assert 2 * batch <= found.beside < 2 * batch + 64, "the batch, the gradient that the head returns, and the loss"
    assert found.between >= batch + head + 3 * logits, "logits, their squares and a gradient, and the head"
    assert found.between < batch + 2 * head + 5 * logits, "the head and its gradient"
    assert model.calls == 0, "the copy ran, not the model"


@pytest.mark.usefixtures("fake_ranks")
def test_blocks_count_by_what_they_compute():
    found = _around(_Model((64, 64, 192, 192)), torch.randn(ROWS, WIDTH))
    assert found.calls == 4
    assert found.in_flight["blocks.0"] > 4 > found.in_flight["blocks.2"], found.in_flight


class _Valued(_Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x.sum()


@pytest.mark.usefixtures("fake_ranks")
def test_a_forward_that_depends_on_values_is_named():
    assert _around(_Valued(), torch.randn(ROWS, WIDTH)).startswith(
        "the forward cannot run on tensors without values: DataDependentOutputException"
    )
    with torch.no_grad():
        model = _Model().requires_grad_(False)
    assert _around(model, torch.randn(ROWS, WIDTH)) == "no output of the forward requires a gradient"
