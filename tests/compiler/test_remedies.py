from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

import dsgraph
from dsgraph.compiler.frames import remedy

MIXTRAL = "site-packages/transformers/models/mixtral/modeling_mixtral.py:79 (forward)"
NONZERO = "Dynamic shape operator: Operator `aten.nonzero.default`'s output shape depends on input Tensor data."


def test_only_experts_of_transformers_have_one():
    assert "grouped_mm" in remedy(MIXTRAL, NONZERO)
    assert remedy(MIXTRAL, "print is not supported") == remedy("model.py:3 (forward)", NONZERO) == ""


class _Experts(nn.Module):
    """As transformers' experts of implementation "eager": which one is used depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, 4))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for number in chosen.nonzero():
            x = x @ self.weight[number[0]]
        return x


def test_a_parameter_that_is_indexed_between_graphs_fails_in_no_graph_of_its_own(one_rank):
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch._dynamo.exc").addHandler(handler)
    model = dsgraph.partition(_Experts(), keep_whole_below=0)
    compiled = torch.compile(model, backend="dsgraph", options={"codegen": "eager"})
    compiled(torch.ones(1, 4), torch.tensor([True, False, True])).sum().backward()
    logging.getLogger("torch._dynamo.exc").removeHandler(handler)
    assert not [line for line in said if "Backend compiler exception" in line]
