"""InsertZeroCollectives: the ZeRO stages, as a lowering of two ops."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsgraph.inductor_ext import Ranks, start_gather_rows, start_reducing
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.graph import (
    behind_views,
    bound_arguments,
    emit,
    fake_value,
    find_calls,
    is_returned,
    replace_and_erase,
)
from dsgraph.passes.ir.recording import Recordings
from dsgraph.passes.ir.save_plan import recompute_with_users

aten = torch.ops.aten


@dataclass(frozen=True)
class InsertZeroCollectives(GraphPass):
    """Lower every `gather_param` and `reduce_grad` to the collectives of its parameter's ZeRO stage.

    stage 3, before:  w = gather_param(shard, None, [5, 8], group="0")
    stage 3, after:   padded = constant_pad_nd(shard, [0, 0, 0, 1])        only when rows do not divide
                      wait = wait_tensor(all_gather_into_tensor(padded, 2, "0"))
                      w = slice(wait, 0, 0, 5)                             only when rows do not divide
    stage 2, 1:       w = gathered copy                                          gathered once a step; see AwaitCopies
    stage 0, whole:   w = shard

    before:  g = reduce_grad(grad, [3, 8], group="0", outer_groups=["1"])
    after:   own = wait_tensor(reduce_scatter_tensor(pad(grad), "sum", 2, "0"))         only with a group
             g = wait_tensor(all_reduce(own, "sum", "1"))[:3] / (2 * size of "1")       once an outer group

    A parameter gathered here, and values cheaply computed from only such parameters (casts, transposes), are tagged for
    recomputation: the backward gathers it again, and nothing of full size is kept in between. A marker's result is a
    tensor of its own: if the graph returns it, or a view of it, an input that replaced it is cloned, so that writes to
    the model's output do not change its parameters. Equal markers, such as those of a parameter that is read inside and
    outside a checkpoint region, share one gather: the split would merge their gathers later, without the waits.
    Left alone: nothing; after this pass no marker remains.
    """

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    changes_collectives: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        gathers = find_calls(gm, torch.ops.dsgraph.gather_param.default)
        reductions = find_calls(gm, torch.ops.dsgraph.reduce_grad.default)
        lowered, recordings = dict[Hashable, Node](), Recordings()
        for node in gathers:
            key = node if is_returned(node) else _what_is_gathered(node)
            if key not in lowered:
                lowered[key] = _own_if_returned(node, _lower_gather(node, ctx, recordings))
            replace_and_erase(node, lowered[key])
        _tag_for_recomputation(lowered.values())
        for node in reductions:
            replace_and_erase(node, _own_if_returned(node, _lower_reduction(node, ctx, recordings)))
        return PassResult(changed=len(gathers) + len(reductions))


def _what_is_gathered(node: Node) -> Hashable:
    """Return a key that is equal for markers of one parameter: each reads the shard through a view of its own."""
    shard = node.all_input_nodes[0]
    value = fake_value(shard)
    place = (value.shape, value.stride(), value.storage_offset())
    return behind_views(shard), repr((place, node.args[1:], node.kwargs))


def _own_if_returned(node: Node, lowered: Node) -> Node:
    """Return `lowered`, or a clone if it is an input and the graph returns the marker `node` or a view of it."""
    if behind_views(lowered).op != "placeholder" or not is_returned(node):
        return lowered
    return emit(node, aten.clone.default, lowered)


def _lower_gather(node: Node, ctx: PassContext, recordings: Recordings) -> Node:
    call = bound_arguments(node)
    if call["gathered_copy"] is not None:
        return call["gathered_copy"]
    ranks, shape, dtype = _ranks(call["group"], ctx), tuple(call["shape"]), call["dtype"]

    def gather(shard: Tensor) -> Tensor:
        return start_gather_rows(shard, shape, ranks, dtype=dtype).finish()

    return recordings.write(node, gather, call["shard"], "gather", ranks, shape, dtype)[-1]


def _lower_reduction(node: Node, ctx: PassContext, recordings: Recordings) -> Node:
    call = bound_arguments(node)
    how = {
        **{name: call[name] for name in ("dtype", "reduce_dtype")},
        "ranks": _ranks(call["group"], ctx),
        "outer": tuple(_ranks(group, ctx) for group in call["outer_groups"]),
    }
    shape = tuple(call["shard_shape"])

    def reduce(grad: Tensor) -> Tensor:
        return start_reducing(grad, shape, **how).finish()

    return recordings.write(node, reduce, call["grad"], "reduce", shape, *how.values())[-1]


def _ranks(group: str, ctx: PassContext) -> Ranks:
    return Ranks(group, ctx.axis(group).size if group else 1)


def _tag_for_recomputation(gathered: Iterable[Node]) -> None:
    """Tag the chains that end in `gathered`, and values cheaply computed from only tagged nodes."""
    tagged: set[Node] = set()
    for full in gathered:
        node = full
        while node.op == "call_function":
            tagged.add(node)
            node = node.all_input_nodes[0]
    recompute_with_users(tagged)
