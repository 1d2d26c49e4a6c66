"""Lower bounds for a joint graph before it is split."""

from __future__ import annotations

import torch
from torch import Tensor

from dsgraph.passes import CostModel
from dsgraph.passes.analysis.sizes import tensor_bytes
from dsgraph.passes.compat import is_tangent, min_cut_rematerialization_partition
from dsgraph.passes.ir.graph import placeholders
from dsgraph.passes.memory.scratch import copy_graph
from dsgraph.passes.memory.step_plan import Planner
from tests.passes.tracing import joint


def _loss(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.mm(torch.mm(x, w).sin().exp(), w)
    return torch.mm(hidden.sigmoid().view(-1, 2).view(x.shape), w).square().sum()


def test_torch_saves_at_least_as_much_by_default():
    gm = joint(_loss, torch.randn(4, 4), torch.randn(4, 4))
    least = Planner(gm, CostModel.default(), outputs=1, fuses=False).least_saved_bytes()
    _, backward = min_cut_rematerialization_partition(copy_graph(gm), [], num_fwd_outputs=1)
    saved = [node for node in placeholders(backward) if not is_tangent(node) and "primals" not in node.name]
    total = sum(tensor_bytes(node.meta["val"]) for node in saved)
    assert 0.6 * total < least <= total
