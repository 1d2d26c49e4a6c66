"""BucketSmallReductions: one all-reduce for the gradients of all small replicated parameters."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsgraph.passes.compat import OpOverload
from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import GraphPass, PassResult
from dsgraph.passes.core.notes import described
from dsgraph.passes.ir.graph import bound_arguments, emit, fake_value, find_calls, replace_and_erase, sort_topologically

aten = torch.ops.aten


@dataclass(frozen=True)
class BucketSmallReductions(GraphPass):
    """Concatenate small gradients of replicated parameters, and reduce them together.

    before:  ga = reduce_grad(a, [8], group="", outer_groups=["0"])
             gb = reduce_grad(b, [2, 2], group="", outer_groups=["0"])
    after:   flat = cat([a, reshape(b, [-1])])
             sums = reduce_grad(flat, [12], group="", outer_groups=["0"])
             parts = split_with_sizes(sums, [8, 4])
             ga = clone(parts[0]); gb = view(clone(parts[1]), [2, 2])

    Each gradient gets memory of its own: torch neither saves nor copies a `DTensor` that begins inside another's
    memory. Gradients of one bucket agree in groups and dtypes. Left alone: sharded parameters, gradients above
    `small_bytes` (their copy would cost more than the collective that it saves), a gradient without a partner, and one
    with which the graph computes further.

    Attributes:
        small_bytes: Gradients of at most this size take part. Bytes.
        bucket_bytes: No bucket exceeds this size. Bytes.
    """

    small_bytes: int = 2**20
    bucket_bytes: int = 25 * 2**20

    phase: ClassVar[Phase] = Phase.JOINT
    graph: ClassVar[str] = "step"
    changes_collectives: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"bucketed-small-reductions"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})  # it buckets the markers

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        replicated = [
            node for node in find_calls(gm, torch.ops.dsgraph.reduce_grad.default) if not bound_arguments(node)["group"]
        ]
        joins = {node: _bytes(node) <= self.small_bytes and _leads_to_outputs_only(node) for node in replicated}
        filled = self._fill(node for node in replicated if joins[node])
        notes = [self._why_alone(node) for node in replicated if not joins[node]]
        notes += [self._why_alone(bucket[0]) for bucket in filled if len(bucket) == 1]
        buckets = [bucket for bucket in filled if len(bucket) > 1]
        is_read = any(user.op != "output" for bucket in buckets for node in bucket for user in node.users)
        for bucket in buckets:
            _reduce_together(bucket)
        if is_read:  # by views and casts that now precede what they read
            sort_topologically(gm.graph)
        return PassResult(changed=sum(map(len, buckets)), notes=tuple(notes))

    def _why_alone(self, node: Node) -> str:
        if _bytes(node) > self.small_bytes:
            reason = f"its {_bytes(node)} bytes are more than small_bytes={self.small_bytes}"
        elif not _leads_to_outputs_only(node):
            reason = "the graph computes with its result"
        else:
            reason = "no other small gradient has its groups and dtypes and fits into its bucket"
        return f"{described(node)} is reduced separately: {reason}"

    def _fill(self, nodes: Iterable[Node]) -> list[list[Node]]:
        open_buckets: dict[object, list[Node]] = defaultdict(list)
        sizes: dict[object, int] = defaultdict(int)
        full: list[list[Node]] = []
        for node in nodes:
            call, own = bound_arguments(node), _bytes(node)
            kind = (fake_value(call["grad"]).dtype, call["dtype"], call["reduce_dtype"], tuple(call["outer_groups"]))
            sizes[kind] += own
            if open_buckets[kind] and sizes[kind] > self.bucket_bytes:
                full.append(open_buckets.pop(kind))
                sizes[kind] = own
            open_buckets[kind].append(node)
        return full + list(open_buckets.values())


def _bytes(node: Node) -> int:
    grad = fake_value(bound_arguments(node)["grad"])
    return int(grad.numel()) * grad.element_size()


def _leads_to_outputs_only(node: Node) -> bool:
    """Return whether the reduced gradient is only viewed and cast on its way to the graph's outputs."""
    for user in node.users:
        if user.op == "output":
            continue
        target = user.target
        if not isinstance(target, OpOverload) or not (target.is_view or torch.Tag.pointwise in target.tags):
            return False
        if len(user.all_input_nodes) != 1 or not _leads_to_outputs_only(user):
            return False
    return True


def _reduce_together(bucket: list[Node]) -> None:
    last = bucket[-1]
    call = bound_arguments(last)
    common = {name: call[name] for name in ("dtype", "reduce_dtype", "group", "outer_groups")}
    flat = [_flat(bound_arguments(node)["grad"], last) for node in bucket]
    joined = emit(last, aten.cat.default, flat)
    sums = emit(last, torch.ops.dsgraph.reduce_grad.default, joined, list(fake_value(joined).shape), **common)
    parts = emit(last, aten.split_with_sizes.default, sums, [fake_value(part).shape[0] for part in flat])
    for number, node in enumerate(bucket):
        own, shape = emit(last, operator.getitem, parts, number), fake_value(node).shape
        own = emit(last, aten.clone.default, own)
        replace_and_erase(node, own if len(shape) == 1 else emit(last, aten.view.default, own, list(shape)))


def _flat(grad: Node, before: Node) -> Node:
    return grad if fake_value(grad).dim() == 1 else emit(before, aten.reshape.default, grad, [-1])
