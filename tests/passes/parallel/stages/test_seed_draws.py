"""Seeds of the random values of a captured forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

from dsgraph.parallel.pipeline.captured_model import capture_model

CPU = torch.device("cpu")


class _Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False)
        x = F.dropout(x, 0.1) + F.scaled_dot_product_attention(x, x, x)
        x = checkpoint(lambda y: torch.rand_like(y) * y, x, use_reentrant=False)
        return x + x.new_empty(2, 1).bernoulli_(0.5) + torch.multinomial(torch.ones(2, 4), 1)


def test_each_random_value_has_a_seed_and_others_are_named():
    captured = capture_model(_Draws(), (torch.ones(2, 4),), kwargs={}, device=CPU)
    gm = captured.graph_module
    check = FileCheck().check("(random_seeds, 1, 0)").check("(random_seeds, 1, 1)").check("(random_seeds, 1, 2)")
    check.check("torch.nn.functional.dropout").check("torch.nn.functional.dropout").check_not("functional.dropout")
    check.check("0.1, seed = select)").check("0.5, seed = select_2)").check("torch.multinomial").run(gm.code)
    (body,) = (module for name, module in gm.named_children())
    FileCheck().check("rand_like").check("seed = select_1").run(body.code)
    assert captured.seeds == 3 and captured.draws
    assert captured.unseeded == ["aten::multinomial in the model"]
    seeds = torch.tensor([[1, 2, 3]])
    torch.manual_seed(0)
    one = gm(torch.ones(2, 4), seeds)[0]
    torch.manual_seed(0)  # for multinomial
    assert torch.equal(one, gm(torch.ones(2, 4), seeds)[0])
