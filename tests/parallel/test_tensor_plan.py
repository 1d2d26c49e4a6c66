"""The plan of a tensor-parallel model."""

from __future__ import annotations

import torch

from dsgraph.parallel.tensor.tensor_plan import plan_by_graph
from tests.composition.features import BY_NAME, build


def test_products_inside_checkpoints_are_sliced_as_outside():
    inputs = (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    plain = plan_by_graph(build([]), inputs, ranks=2, given=None)
    inside = plan_by_graph(build([BY_NAME["activation checkpointing"]]), inputs, ranks=2, given=None)
    assert len(plain.slices) >= 4 * 2
    assert {name.replace(".block.", "."): held for name, held in inside.slices.items()} == plain.slices
