"""`OffloadGradients`: which gradients leave, and where."""

from __future__ import annotations

import torch

from dsgraph.passes.ir.graph import find_calls
from dsgraph.passes.ir.parameters import ParameterSpec
from dsgraph.passes.memory.offload_gradients import OffloadGradients
from tests.passes.tracing import run_pass, trace

ops = torch.ops.dsgraph


def _backward(dy, x, first, second):
    dz = dy @ second.t()
    return dz @ first.t(), x.t() @ dz, x.t() @ dy


def test_a_gradient_leaves_as_soon_as_it_is_there():
    gm = trace(_backward, *(torch.randn(8, 8) for _ in range(4)))
    first, second = (node.name for node in gm.graph.find_nodes(op="placeholder")[2:])
    shape = (8, 8)
    params = {
        first: ParameterSpec("first", shape, shape, torch.float32, "0", True, "disk"),
        second: ParameterSpec("second", shape, shape, torch.float32, "0", True),
    }
    before = list(gm.graph.output_node().args[0])
    result = run_pass(OffloadGradients(), gm, params=params, gradients={1: "first", 2: "second"})
    (stored,) = find_calls(gm, ops.store_gradient.default)
    after = list(gm.graph.output_node().args[0])
    assert result.changed == 1
    assert after == [before[0], stored, before[2]], "what is in memory is returned as it was"
    assert stored.args[0] is before[1] and stored.args[1].name == first
    assert stored.prev is before[1], "nothing else is computed in between"
