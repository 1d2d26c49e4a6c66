"""ChooseCollectiveAlgorithms: each collective in the form that its backend runs fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import c10d_functional

from .base import GraphPass, PassContext, PassResult, Phase
from .graph import bound_arguments, emit, fake_value, find_calls, replace_and_erase

aten = torch.ops.aten


@dataclass(frozen=True)
class ChooseCollectiveAlgorithms(GraphPass):
    """On gloo, reduce-scatter by exchanging rows and adding them up locally; elsewhere keep the backend's own.

    before:  own = wait_tensor(reduce_scatter_tensor(grad, "sum", 2, "0"))
    after:   rows = wait_tensor(all_to_all_single(grad, [r, r], [r, r], "0"))
             own = sum(view(rows, [2, r, ...]), [0])

    gloo's reduce-scatter takes about as long as two all-reduces of the same tensor; its all-to-all only copies. The
    local sum adds in the order of ranks. Left alone: NCCL and every other backend, reductions other than "sum".
    """

    phase: ClassVar[Phase] = Phase.JOINT
    needs_mesh: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        changed = 0
        for started in find_calls(gm, c10d_functional.reduce_scatter_tensor.default):
            call = bound_arguments(started)
            if call["reduce_op"] == "sum" and _is_gloo(str(call["group_name"]), ctx):
                _exchange_and_add(started)
                changed += 1
        return PassResult(changed=changed)


def _is_gloo(group: str, ctx: PassContext) -> bool:
    # A user's own collective may name a group outside the mesh: not ours to change.
    return any(axis.group == group and axis.backend == "gloo" for axis in ctx.axes)


def _exchange_and_add(started: Node) -> None:
    call = bound_arguments(started)
    (wait,) = started.users
    world, rows = call["group_size"], fake_value(started).shape[0]
    splits = [rows] * world
    exchange = c10d_functional.all_to_all_single.default
    sent = emit(wait, exchange, call["input"], splits, splits, call["group_name"])
    received = emit(wait, c10d_functional.wait_tensor.default, sent)
    by_rank = emit(wait, aten.view.default, received, [world, rows, *fake_value(started).shape[1:]])
    replace_and_erase(wait, emit(wait, aten.sum.dim_IntList, by_rank, [0]))
    started.graph.erase_node(started)
