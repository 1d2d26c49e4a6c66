"""ChooseCollectiveAlgorithms: each collective in the form that its backend runs fastest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import c10d_functional

from .base import GraphPass, PassContext, PassResult, Phase
from .graph import bound_arguments, collective_group, emit, fake_value, find_calls, replace_and_erase, wait_of

aten = torch.ops.aten


@dataclass(frozen=True)
class ChooseCollectiveAlgorithms(GraphPass):
    """On gloo, gather and reduce-scatter by messages between ranks; elsewhere keep the backend's own.

    before:  w = wait_tensor(all_gather_into_tensor(shard, 2, "0"))
    after:   w = wait_tensor(gather_by_messages(shard, 2, "0"))

    before:  own = wait_tensor(reduce_scatter_tensor(grad, "sum", 2, "0"))
    after:   rows = wait_tensor(exchange_by_messages(grad, 2, "0"))
             own = sum(view(rows, [2, r, ...]), [0])

    gloo's all-gather breaks when two are under way at once, see `gather_by_messages`. Its reduce-scatter is an
    all-reduce of the whole tensor: twice the bytes. Messages use both directions of a link at once. The local sum adds
    in the order of ranks. Left alone: NCCL and every other backend, tensors outside the host's memory (gloo sends no
    others by messages), reductions other than "sum", and a user's own with sizes that vary.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    needs_mesh: ClassVar[bool] = True
    changes_collectives: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        gathers = _on_gloo(find_calls(gm, c10d_functional.all_gather_into_tensor.default), ctx)
        for started in gathers:
            _gather_by_messages(started)
        reductions = _on_gloo(find_calls(gm, c10d_functional.reduce_scatter_tensor.default), ctx)
        sums = [started for started in reductions if _is_sum_of_known_size(started)]
        for started in sums:
            _exchange_and_add(started)
        return PassResult(changed=len(gathers) + len(sums))


def _on_gloo(nodes: Iterable[Node], ctx: PassContext) -> list[Node]:
    # A user's own collective may name a group outside the mesh: not ours to change.
    groups = {axis.group for axis in ctx.axes if axis.backend == "gloo"}
    return [node for node in nodes if collective_group(node) in groups and fake_value(node).device.type == "cpu"]


def _is_sum_of_known_size(started: Node) -> bool:
    sizes = fake_value(started).shape
    return bound_arguments(started)["reduce_op"] == "sum" and all(isinstance(size, int) for size in sizes)


def _gather_by_messages(started: Node) -> None:
    call = bound_arguments(started)
    gather = torch.ops.dsgraph.gather_by_messages.default
    replacement = emit(started, gather, call["input"], call["group_size"], call["group_name"])
    if "recompute" in started.meta:
        replacement.meta["recompute"] = started.meta["recompute"]
    replace_and_erase(started, replacement)


def _exchange_and_add(started: Node) -> None:
    call = bound_arguments(started)
    wait = wait_of(started)
    world, rows = call["group_size"], fake_value(started).shape[0]
    exchange = torch.ops.dsgraph.exchange_by_messages.default
    sent = emit(wait, exchange, call["input"], world, call["group_name"])
    received = emit(wait, c10d_functional.wait_tensor.default, sent)
    by_rank = emit(wait, aten.view.default, received, [world, rows, *fake_value(started).shape[1:]])
    # Named, because a sum of integers would be of int64 otherwise.
    summed = emit(wait, aten.sum.dim_IntList, by_rank, [0], dtype=fake_value(started).dtype)
    replace_and_erase(wait, summed)
    started.graph.erase_node(started)
