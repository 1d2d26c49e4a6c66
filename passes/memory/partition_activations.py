"""PartitionActivations: each tensor-parallel rank saves its slice of the activations that all ranks have alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dsgraph.inductor_ext import c10d_functional
from dsgraph.passes.analysis.replication import replicated_values
from dsgraph.passes.analysis.sizes import UNKNOWN_SIZE, hint
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pair import GraphPair
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.ir.collectives import collectives
from dsgraph.passes.ir.graph import come_from, emit, fake_value, placeholders
from dsgraph.passes.ir.parameters import AxisRole, MeshAxis
from dsgraph.passes.ir.size_nodes import SizeNodes

from .stored_values import StoredValue, drop_stored, find_stored, make_views

aten, ops = torch.ops.aten, torch.ops.dsgraph
_SLICE = "slice"


@dataclass(frozen=True)
class PartitionActivations(GraphPass):
    """Save a slice of each activation that is equal on all tensor-parallel ranks; gather it for the backward.

    forward before:   x = f(a); y = g(x)                                            # x is saved
    forward after:    x = f(a); y = g(x); own = own_slice(x.view(-1), ..., "tp")    # own is saved

    backward before:  dy = dh(dz); dx = dg(dy, x)
    backward after:   start = all_gather_into_tensor(own, "tp"); dy = dh(dz); x = wait_tensor(start).view(...)
                      dx = dg(dy, x)

    Complete pieces of memory are sliced: for a saved view the tensor that it is a view of, and the backward makes the
    view again. Equality on all ranks is proved on the forward, see `replicated_values`: it holds for the batch and for
    results of deterministic ops on it, also after each sum over the group. A gather starts after the collective before
    its first use, at the same place on every rank. Gradients equal those without the pass, bit for bit. This is the
    partitioning of activations of Rajbhandari et al.: ZeRO, arXiv 1910.02054, section 6.1.

    Left alone: values that differ between ranks, inputs, parameters, values that a node writes to or the model returns,
    values that may not divide evenly, and graphs without a tensor-parallel axis.

    Attributes:
        least_bytes: Smaller values stay.
    """

    least_bytes: int = 64 * 2**10

    phase: ClassVar[Phase] = Phase.PAIR
    changes_collectives: ClassVar[bool] = True

    def run(self, pair: GraphPair, ctx: PassContext) -> PassResult:
        axis = next((axis for axis in ctx.axes if axis.role is AxisRole.TENSOR and axis.size > 1), None)
        if axis is None:
            return PassResult(notes=("activations are not sharded: the model has no tensor-parallel operator",))
        sizes = SizeNodes(pair.backward, saved={theirs.name for _, theirs in pair.crossing()})
        found, notes = find_stored(pair, ctx, sizes, tier=_SLICE, least_bytes=self.least_bytes)
        alike = replicated_values(pair.forward, axis.group, replicated_inputs=_replicated_inputs(pair, ctx, axis.group))
        asked = [item for item in found if item.tier == _SLICE]
        same = [item for item in asked if item.base in alike]
        reasons = {item.base: _reason_to_stay(item, axis) for item in same}
        taken = [item for item in same if not reasons[item.base]]
        notes.extend(filter(None, reasons.values()))
        if len(asked) > len(same):
            rest = sum(item.size for item in asked) - sum(item.size for item in same)
            notes.append(f"{len(asked) - len(same)} saved values, {rest} bytes, are not proved equal on all ranks")
        if taken:
            _split(pair, taken, sizes, axis)
        total = sum(item.size for item in taken)
        done = (f"{len(taken)} saved values, {total} bytes, of which each of {axis.size} ranks saves a shard",)
        return PassResult(changed=len(taken), notes=tuple(notes), done=done if taken else ())


def _replicated_inputs(pair: GraphPair, ctx: PassContext, group: str) -> list[Node]:
    """Return the forward's inputs that are equal on all ranks of the group: all of known roles but slices."""
    roles = ((node, ctx.roles.get(node.name)) for node in placeholders(pair.forward))
    return [node for node, known in roles if known is not None and known.slice_group != group]


def _reason_to_stay(item: StoredValue, axis: MeshAxis) -> str:
    if statically_known_true(fake_value(item.base).numel() % axis.size == 0):
        return ""
    return (
        f"{item.base.name} is not sharded, {item.size} bytes: its elements do not divide evenly over {axis.size} ranks"
    )


def _split(pair: GraphPair, taken: Sequence[StoredValue], sizes: SizeNodes, axis: MeshAxis) -> None:
    """Save slices in the forward, and gather them in the backward."""
    own = [_own_slice(item, axis) for item in taken]
    number_of = {node: number for number, node in enumerate(pair.backward.graph.nodes)}
    known = [node for node in collectives(pair.backward) if node in number_of]
    for item, saved in zip(taken, pair.save_all(own), strict=True):
        earlier = [node for node in known if number_of[node] < number_of[item.backward_place]]
        place = earlier[-1].next if earlier else next(n for n in pair.backward.graph.nodes if n.op != "placeholder")
        started = emit(place, c10d_functional.all_gather_into_tensor.default, saved, axis.size, axis.group)
        flat = emit(item.backward_place, c10d_functional.wait_tensor.default, started)
        make_views(item, _shaped(item, flat, sizes), sizes)
    drop_stored(pair, taken)


def _by_stride(item: StoredValue) -> list[int]:
    """Return the dimensions of a value in the order of its memory, the slowest first."""
    value = fake_value(item.base)
    known = [
        (hint(value.stride(dim), unknown=UNKNOWN_SIZE), hint(value.shape[dim], unknown=UNKNOWN_SIZE))
        for dim in range(value.dim())
    ]
    return sorted(range(value.dim()), key=lambda dim: (*(-number for number in known[dim]), dim))


def _own_slice(item: StoredValue, axis: MeshAxis) -> Node:
    """Insert this rank's slice of a value's memory after the value's last use in the forward."""
    before = item.forward_place.next
    lying = emit(before, aten.permute.default, item.base, _by_stride(item))
    flat = emit(before, aten.view.default, lying, [-1])
    return come_from(emit(before, ops.own_slice.default, flat, 0, 1, axis.size, axis.group), item.base)


def _shaped(item: StoredValue, flat: Node, sizes: SizeNodes) -> Node:
    """Return the original value from its flat memory."""
    order, shape = _by_stride(item), fake_value(item.base).shape
    lying = emit(item.backward_place, aten.view.default, flat, [sizes.node(shape[dim]) for dim in order])
    return emit(item.backward_place, aten.permute.default, lying, [order.index(dim) for dim in range(len(order))])
