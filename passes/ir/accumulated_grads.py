"""Accumulated gradients in a joint graph, which are added before a reduction."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .graph import bound_arguments, cast, emit, fake_value, find_calls

aten = torch.ops.aten


def write_accumulated_grads(gm: GraphModule) -> int:
    """Write the sums that markers add as plain additions, each once; return their number.

    before:  ga = reduce_grad(a, [3, 8], total, ...); gb = reduce_grad(b, [3, 8], total, ...)
    after:   ga = reduce_grad(add(total, a), [3, 8], ...); gb = reduce_grad(b, [3, 8], ...)

    A parameter has several reductions if its markers were not merged, as those of two checkpoint regions. Each of its
    markers was given the sum, because only the joint graph shows which of them receive a gradient. The first reduction
    adds it. This is not a pass, because every pipeline depends on it.
    """
    added: set[Node] = set()
    ops = torch.ops.dsgraph
    for node in (*find_calls(gm, ops.reduce_grad.default), *find_calls(gm, ops.reduce_compressed.default)):
        call = bound_arguments(node)
        total, grad = call["accumulated_grad"], call["grad"]
        if total is None:
            continue
        if total not in added:
            added.add(total)
            grad = emit(node, aten.add.Tensor, total, cast(node, grad, fake_value(total).dtype))
        between = () if node.target is ops.reduce_grad.default else node.args[2:6]
        node.args = (grad, call["shard_shape"], *between)
    return len(added)
