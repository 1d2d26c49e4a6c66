"""The values of a joint graph's forward that can be saved."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from dsgraph.passes import CostModel
from dsgraph.passes.analysis.memory import simulate
from dsgraph.passes.compat import min_cut_rematerialization_partition
from dsgraph.passes.ir.graph import find_calls, placeholders
from dsgraph.passes.ir.save_plan import Choice, decide
from dsgraph.passes.memory.forward_values import read_forward_values
from tests.passes.tracing import SHARD, trace

aten = torch.ops.aten


def _joint() -> GraphModule:
    def joint(primals, tangents):
        a = primals.sin()
        result = a.exp()
        only_behind = a * 2
        return result, tangents * a * only_behind

    return trace(joint, torch.randn(256, 256), torch.randn(256, 256))


def test_what_the_backward_alone_computes_with_is_no_choice():
    gm = _joint()
    found = read_forward_values(gm, simulate(gm), CostModel.default((SHARD,)), outputs=1, fuses=False)
    (sine,), product = find_calls(gm, aten.sin.default), find_calls(gm, aten.mul.Tensor)[0]
    assert found.values[sine].saved is None and found.values[sine].may_offload
    assert found.values[product].saved is False and not found.values[product].may_offload
    assert found.values[product].needed


def test_torch_does_not_save_it_either():
    gm = _joint()
    (sine,), product = find_calls(gm, aten.sin.default), find_calls(gm, aten.mul.Tensor)[0]
    for node in (sine, product):
        decide(node, Choice.SAVE)
    _, backward = min_cut_rematerialization_partition(gm, [], num_fwd_outputs=1)
    names = {node.name for node in placeholders(backward)}
    assert sine.name in names and product.name not in names
