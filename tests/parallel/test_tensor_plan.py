"""The plan of a tensor-parallel model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsgraph.parallel.tensor.tensor_plan import plan_by_graph
from dsgraph.passes.parallel.slices import Slice
from tests.composition.features import BY_NAME, build


def test_products_inside_checkpoints_are_sliced_as_outside():
    inputs = (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    plain = plan_by_graph(build([]), inputs, ranks=2, given=None)
    inside = plan_by_graph(build([BY_NAME["activation checkpointing"]]), inputs, ranks=2, given=None)
    assert len(plain.slices) >= 4 * 2
    assert {name.replace(".block.", "."): held for name, held in inside.slices.items()} == plain.slices


class _Turned(nn.Module):
    """Products that are written with the transpose of a weight, inside a checkpoint; the first has unequal pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.down = nn.Linear(8, 12, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inside, x, use_reentrant=False)

    def _inside(self, x: Tensor) -> Tensor:
        wide, narrow = (x @ self.fused.weight.T).split((8, 4), -1)
        return (wide * narrow.repeat(1, 2)) @ self.down.weight.T


def test_a_transpose_that_enters_a_checkpoint_is_planned_as_the_weight():
    inputs, names = (torch.ones(3, 8),), ("fused.weight", "down.weight")
    found = plan_by_graph(_Turned(), inputs, ranks=2, given=None)
    assert found.slices == dict(zip(names, (Slice(0), Slice(1)), strict=True))
    given = {"fused.weight": Slice(0), "down.weight": Slice(1)}
    assert plan_by_graph(_Turned(), inputs, ranks=2, given=given).slices == given
