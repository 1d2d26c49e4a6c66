"""Values that a graph proves equal on all ranks of a group."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from dsgraph.passes.analysis.replication import replicated_values

aten, ops, c10d = torch.ops.aten, torch.ops.dsgraph, torch.ops._c10d_functional


def _names(build):
    """The nodes of a graph over a replicated `x` and a sliced `own` that are replicated over group "tp"."""
    graph = Graph()
    x, own = graph.placeholder("x"), graph.placeholder("own")
    call = lambda name, target, *args: graph.create_node("call_function", target, args, name=name)  # noqa: E731
    graph.output(build(call, x, own))
    gm = GraphModule({}, graph)
    return {node.name for node in replicated_values(gm, "tp", replicated_inputs=[x])}


def test_deterministic_ops_keep_it_and_slices_end_it():
    def build(call, x, own):
        return [call("same", aten.tanh.default, x), call("mixed", aten.mul.Tensor, x, own)]

    assert _names(build) == {"x", "same"}


def test_a_sum_or_a_gather_over_the_group_makes_it_anew():
    def build(call, x, own):
        started = call("started", c10d.all_gather_into_tensor.default, own, 2, "tp")
        scattered = call("scattered", c10d.reduce_scatter_tensor.default, x, "sum", 2, "tp")
        other = call("other", c10d.all_reduce.default, own, "sum", "dp")
        total = call("total", ops.sum_slices.default, own, "tp")
        return [call("waited", c10d.wait_tensor.default, started), scattered, other, total]

    assert _names(build) == {"x", "started", "waited", "total"}


def test_random_numbers_this_ranks_slice_and_unknown_code_end_it():
    def build(call, x, own):
        drawn = call("drawn", aten.native_dropout.default, x, 0.5, True)
        mine = call("mine", ops.own_slice.default, x, 0, 1, 2, "tp")
        return [drawn, mine, call("unknown", torch.sigmoid, x)]

    assert _names(build) == {"x"}
