"""LowerForwardSlices and LowerBackwardSlices on graphs of a few calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.lowering import lowerings
from torch.fx.experimental.proxy_tensor import make_fx

from dsgraph.passes import AxisRole, MeshAxis
from dsgraph.passes.parallel.lower_slices import LowerBackwardSlices, LowerForwardSlices
from tests.passes.tracing import code, run_pass, trace

_own = torch.ops.dsgraph
SLICES = MeshAxis("tp", 8, "0", "nccl", AxisRole.TENSOR)


def _layer(x: Tensor, own: Tensor, group: str) -> tuple[Tensor, Tensor]:
    entered = _own.enter_slices(x, group)
    return _own.sum_slices(entered.sin(), group), _own.gather_slices(own, 1, 3, 8, group).cos()


def test_dynamic_sizes_are_nodes_of_the_graph(fake_ranks):
    group = dist.group.WORLD.group_name
    own = torch.randn(5, 7, 6)
    gm = make_fx(lambda own: _own.gather_slices(own, 2, 1, 8, group).cos(), tracing_mode="symbolic")(own)
    expected = gm(own)
    assert run_pass(LowerForwardSlices(), gm, SLICES).changed == 1
    torch.testing.assert_close(gm(own), expected, rtol=0, atol=0)
    longer = torch.randn(9, 4, 6)
    assert gm(longer).shape == (9, 4, 48), "the graph holds for other sizes, too"


@pytest.mark.parametrize("op", ["gather_slices", "gather_entered", "scatter_sum"])
def test_ops_are_those_that_inductor_lowers(fake_ranks, op):
    """Inductor has decomposed others before a forward graph reaches it, and refuses them there."""
    group = dist.group.WORLD.group_name
    call = getattr(_own, op)
    gm = trace(lambda own: call(own, 2, 3, 8, group).cos(), torch.randn(3, 4, 48))
    run_pass(LowerForwardSlices(), gm, SLICES)
    called = {node.target for node in gm.graph.nodes if node.op == "call_function"}
    assert called <= lowerings.keys()


def test_slices_communicate_by_collectives_that_inductor_knows(fake_ranks):
    group = dist.group.WORLD.group_name
    values = torch.randn(3, 4), torch.randn(2, 6)
    gm = trace(lambda x, own: _layer(x, own, group), *values)
    expected = gm(*values)
    assert run_pass(LowerForwardSlices(), gm, SLICES).changed == 3
    assert "dsgraph" not in code(gm)
    assert code(gm).count("_c10d_functional.all_reduce.") == code(gm).count("all_gather_into_tensor.") == 1
    for mine, op in zip(gm(*values), expected, strict=True):
        torch.testing.assert_close(mine, op, rtol=0, atol=0)
    assert run_pass(LowerBackwardSlices(), gm, SLICES).changed == 0
