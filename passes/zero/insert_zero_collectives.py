"""InsertZeroCollectives: the ZeRO stages, as a lowering of two ops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import c10d_functional, chunk_rows
from dsgraph.passes.compat import OpOverload
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import (
    bound_arguments,
    emit,
    fake_value,
    find_calls,
    is_returned,
    is_view,
    replace_and_erase,
)
from dsgraph.passes.ir.save_plan import Choice, decide

aten = torch.ops.aten


@dataclass(frozen=True)
class InsertZeroCollectives(GraphPass):
    """Lower every `gather_param` and `reduce_grad` to the collectives of its parameter's ZeRO stage.

    stage 3, before:  w = gather_param(shard, None, [5, 8], group="0")
    stage 3, after:   padded = constant_pad_nd(shard, [0, 0, 0, 1])        only when rows do not divide
                      wait = wait_tensor(all_gather_into_tensor(padded, 2, "0"))
                      w = slice(wait, 0, 0, 5)                             likewise
    stage 2, 1:       w = replica                                          gathered once a step; see AwaitReplicas
    stage 0, whole:   w = shard

    before:  g = reduce_grad(grad, [3, 8], group="0", outer_groups=["1"])
    after:   own = wait_tensor(reduce_scatter_tensor(pad(grad), "sum", 2, "0"))         only with a group
             g = wait_tensor(all_reduce(own, "sum", "1"))[:3] / (2 * size of "1")       once an outer group

    A parameter gathered here, and whatever is cheaply computed from such parameters alone (casts, transposes), is
    tagged for recomputation: the backward gathers it again, and nothing of full size is kept in between. A marker's
    result is a tensor of its own: where the graph returns it, or a view of it, an input that took its place is cloned,
    lest whoever writes to what the model returned writes to its parameters. Left alone: nothing; after this pass no
    marker remains.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    needs_mesh: ClassVar[bool] = True
    changes_collectives: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        gathers = find_calls(gm, torch.ops.dsgraph.gather_param.default)
        reductions = find_calls(gm, torch.ops.dsgraph.reduce_grad.default)
        lowered = []
        for node in gathers:
            full = _own_if_returned(node, _lower_gather(node, ctx))
            replace_and_erase(node, full)
            lowered.append(full)
        _tag_for_recomputation(lowered)
        for node in reductions:
            replace_and_erase(node, _own_if_returned(node, _lower_reduction(node, ctx)))
        return PassResult(changed=len(gathers) + len(reductions))


def _own_if_returned(node: Node, lowered: Node) -> Node:
    """`lowered`, or a clone of it where it is an input and the graph returns the marker `node` or a view of it."""
    source = lowered
    while is_view(source):
        source = source.all_input_nodes[0]
    if source.op != "placeholder" or not is_returned(node):
        return lowered
    return emit(node, aten.clone.default, lowered)


def _lower_gather(node: Node, ctx: PassContext) -> Node:
    call = bound_arguments(node)
    if call["replica"] is not None:
        return call["replica"]
    compute = _cast(node, call["shard"], call["dtype"])
    if not call["group"] or ctx.axis(call["group"]).size == 1:
        return compute
    rows, axis = call["shape"][0], ctx.axis(call["group"])
    padded = _pad_rows(node, compute, chunk_rows(rows, axis.size))
    started = emit(node, c10d_functional.all_gather_into_tensor.default, padded, axis.size, axis.group)
    return _take_rows(node, emit(node, c10d_functional.wait_tensor.default, started), rows)


def _lower_reduction(node: Node, ctx: PassContext) -> Node:
    call = bound_arguments(node)
    summed = _cast(node, call["grad"], call["reduce_dtype"])
    averaged_over = math.prod(ctx.axis(group).size for group in (call["group"], *call["outer_groups"]) if group)
    if call["group"] and ctx.axis(call["group"]).size > 1:
        axis = ctx.axis(call["group"])
        padded_rows = axis.size * chunk_rows(fake_value(summed).shape[0], axis.size)
        padded = _contiguous(node, _pad_rows(node, summed, padded_rows))
        started = emit(node, c10d_functional.reduce_scatter_tensor.default, padded, "sum", axis.size, axis.group)
        summed = emit(node, c10d_functional.wait_tensor.default, started)
    for group in call["outer_groups"]:
        if ctx.axis(group).size == 1:
            continue
        started = emit(node, c10d_functional.all_reduce.default, _contiguous(node, summed), "sum", group)
        summed = emit(node, c10d_functional.wait_tensor.default, started)
    if call["group"]:  # after the outer groups, so that all ranks reduce the same shape over them
        summed = _take_rows(node, summed, call["shard_shape"][0])
    averaged = summed if averaged_over == 1 else emit(node, aten.div.Tensor, summed, averaged_over)
    return _cast(node, averaged, call["dtype"])


def _cast(node: Node, value: Node, dtype: torch.dtype) -> Node:
    if fake_value(value).dtype == dtype:
        return value
    return emit(node, torch.ops.prims.convert_element_type.default, value, dtype)


def _pad_rows(node: Node, value: Node, rows: int) -> Node:
    have = fake_value(value)
    if have.shape[0] == rows:
        return value
    padding = [0, 0] * (have.dim() - 1) + [0, rows - have.shape[0]]  # last dimension first
    return emit(node, aten.constant_pad_nd.default, value, padding)


def _contiguous(node: Node, value: Node) -> Node:
    """`value` in the one layout that collectives take: some versions of torch (2.11) refuse others."""
    if fake_value(value).is_contiguous():
        return value
    return emit(node, aten.clone.default, value, memory_format=torch.contiguous_format)


def _take_rows(node: Node, value: Node, rows: int) -> Node:
    if fake_value(value).shape[0] == rows:
        return value
    return emit(node, aten.slice.Tensor, value, 0, 0, rows)


def _tag_for_recomputation(gathered: Iterable[Node]) -> None:
    """Tags the chains that end in `gathered`, and what is cheaply computed from tagged nodes alone."""
    tagged: set[Node] = set()
    for full in gathered:
        node = full
        while node.op == "call_function":
            tagged.add(node)
            node = node.all_input_nodes[0]
    for node in tagged:
        decide(node, Choice.RECOMPUTE)
    frontier = [user for node in tagged for user in node.users]
    while frontier:
        node = frontier.pop()
        if node in tagged or not _is_cheap(node) or not all(argument in tagged for argument in node.all_input_nodes):
            continue
        decide(node, Choice.RECOMPUTE)
        tagged.add(node)
        frontier.extend(node.users)


def _is_cheap(node: Node) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload) or node.meta.get("partitioner_tag") == "is_backward":
        return False
    return target.is_view or torch.Tag.pointwise in target.tags or target is aten._to_copy.default
