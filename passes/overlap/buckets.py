"""The choice of buckets: neighbouring collectives of one kind, if the latency that they save is worth their wait.

A bucket starts once and pays the latency of one collective, and its members arrive together. So a collective joins its
neighbours while a latency is at least a share of the transfer time of the bucket, including it: small tensors are sent
together, large ones alone. On NCCL collectives also join while a rank's part of the bucket is below 4 MiB: NCCL divides
it among its channels, and with too little for each no link reaches its rate, which the cost model does not know. In the
graph of a step, all parameters that one unit reads share a bucket, and so do all gradients that it computes: no part
could be used earlier.

All numbers here are equal on all ranks: sizes of parameters, links' latencies and rates, and the memory to spare.
Predicted times of computation are not, and ranks with different buckets would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import Node

from dsgraph.passes.analysis.cost import sent_bytes
from dsgraph.passes.analysis.sizes import tensor_bytes
from dsgraph.passes.core.context import PassContext
from dsgraph.passes.core.graph_pass import GraphPass
from dsgraph.passes.core.notes import described
from dsgraph.passes.ir.collectives import collective_group, collective_kind, collective_of, is_gather
from dsgraph.passes.ir.gathers import computing_unit, reading_unit
from dsgraph.passes.ir.graph import bound_arguments, fake_value
from dsgraph.passes.ir.parameters import MeshAxis
from dsgraph.passes.ir.save_plan import chosen

_DEFAULT_BYTES = 25 * 2**20
_LEAST_PART = 4 * 2**20  # bytes of a rank: 8 channels of NCCL with a chunk of 512 KiB each, its default

Obstacle = Callable[[Sequence[Node], Node], "str | None"]
"""Returns why a collective must not join a bucket, or None."""


@dataclass(frozen=True)
class Bucketing(GraphPass):
    """A pass that fills buckets, with their limits.

    Attributes:
        bucket_bytes: The most bytes of full tensors (gathered parameters, full gradients) in a bucket. A larger tensor
            is sent alone. None: 25 MiB, and on NCCL 4 MiB for each rank of the group, if that is more and a step leaves
            memory to spare.
        latency_share: A bucket grows while a latency is at least this share of its transfer time.
    """

    bucket_bytes: int | None = None
    latency_share: float = 0.25

    graph: ClassVar[str] = "step"
    changes_collectives: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"zero-collectives"})


@dataclass(frozen=True)
class _Member:
    """A collective, with the properties that decide about its bucket.

    Attributes:
        node: The node that starts it.
        alike: The properties that all members of a bucket share.
        bytes: Bytes of its input or output, whichever is more.
        sent: Bytes that each rank sends.
        unit: The unit that reads its result or computes its input; None in graphs without units.
    """

    node: Node
    alike: Hashable
    bytes: int
    sent: int
    unit: Node | None = None


def least_bytes(axis: MeshAxis) -> int:
    """Return the bytes of full tensors below which a bucket is too small for the link of its group; 0 if none is."""
    return _LEAST_PART * axis.size if axis.backend == "nccl" else 0


def fill(
    ordered: Sequence[Node], ctx: PassContext, limits: Bucketing, *, obstacle: Obstacle
) -> tuple[list[list[Node]], tuple[str, ...]]:
    """Return buckets of two or more collectives, in order, and notes on those left alone.

    Args:
        ordered: All collectives in the order of the buckets. Only neighbours share one; those that cannot be in a
            bucket are included.
        ctx: The facts; of them, links and sizes of groups.
        limits: The pass, with the limits of its buckets.
        obstacle: Returns further reasons against a member.
    """
    members = [_member(node, ctx) for node in ordered]
    backends = sorted({_backend_that_cannot(node, ctx) for node in ordered} - {""})
    notes = [
        f"nothing is bucketed on backend {name!r}: it is not known to run several collectives as one"
        for name in backends
    ]
    buckets, reasons = _grow(members, ctx, limits, obstacle=obstacle)
    if not buckets:
        possible, _ = _grow(members, ctx, replace(limits, latency_share=0.0), obstacle=obstacle)
        notes += [_why_apart(possible, ctx, limits)] if possible else []
    return [[member.node for member in bucket] for bucket in buckets], (*notes, *reasons)


def _grow(
    members: Sequence[_Member | None], ctx: PassContext, limits: Bucketing, *, obstacle: Obstacle
) -> tuple[list[list[_Member]], list[str]]:
    """Return the buckets, and the reasons of obstacles. None stands for a collective that cannot be in a bucket."""
    buckets: list[list[_Member]] = [[]]
    reasons = []
    for member in members:
        bucket = buckets[-1]
        if member is not None and bucket and _may_join(bucket, member, ctx, limits):
            reason = obstacle([other.node for other in bucket], member.node)
            if reason is None:
                bucket.append(member)
                continue
            reasons.append(f"{described(member.node)} does not share a bucket with {bucket[-1].node.name}: {reason}")
        buckets.append([member] if member is not None else [])
    return [bucket for bucket in buckets if len(bucket) > 1], reasons


def _may_join(bucket: Sequence[_Member], member: _Member, ctx: PassContext, limits: Bucketing) -> bool:
    together = (*bucket, member)
    size, least = sum(one.bytes for one in together), _least_bytes(member.node, ctx)
    most = max(_DEFAULT_BYTES, least) if limits.bucket_bytes is None else limits.bucket_bytes
    if member.alike != bucket[0].alike or size > most:
        return False
    if size <= least or (member.unit is not None and member.unit is bucket[-1].unit):
        return True
    latency = _seconds(member.node, 0, ctx)
    travelling = _seconds(member.node, sum(one.sent for one in together), ctx) - latency
    return latency > 0 and latency >= limits.latency_share * travelling


def _least_bytes(node: Node, ctx: PassContext) -> int:
    """Return `least_bytes` of a collective's group; 0 if the step leaves no memory to spare, see `spare_bytes`."""
    return 0 if ctx.budget.to_keep == 0 else least_bytes(ctx.axis(collective_group(node)))


def _member(node: Node, ctx: PassContext) -> _Member | None:
    size = next((axis.size for axis in ctx.axes if axis.group == collective_group(node)), None)
    if not _is_bucketed(node) or size is None or _backend_that_cannot(node, ctx):
        return None
    value, read, sent = fake_value(node), list(map(fake_value, node.all_input_nodes)), sent_bytes(node, size)
    amounts = [tensor_bytes(value), tensor_bytes(read)]
    known = [amount for amount in amounts if isinstance(amount, int)]
    if len(known) < len(amounts) or not isinstance(sent, int):
        return None  # sizes that vary
    others = tuple(value for value in bound_arguments(node).values() if not isinstance(value, Node))
    alike = (node.target, others, value.dtype, value.device, chosen(node))
    unit = reading_unit(node) if is_gather(node) else computing_unit(node)
    return _Member(node, alike, max(known), sent, unit)


def _is_bucketed(node: Node) -> bool:
    """Return whether a collective is of one tensor, and of a kind with a coalesced form."""
    kind = collective_of(node)
    return kind is not None and kind.coalesced is not None and node.target is kind.op


def _backend_that_cannot(node: Node, ctx: PassContext) -> str:
    """Return the backend that may not be able to start several of a collective at once; empty if it can."""
    group = collective_group(node)
    backend = next((axis.backend for axis in ctx.axes if axis.group == group), "")
    kind = collective_of(node)
    return backend if _is_bucketed(node) and kind and kind.coalesces_on and backend not in kind.coalesces_on else ""


def _seconds(node: Node, sent: int, ctx: PassContext) -> float:
    """Return the time of a collective of the kind and group of `node`; 0 if its link is unknown."""
    return ctx.costs.transfer_seconds(collective_kind(node), collective_group(node), sent) or 0.0


def _why_apart(possible: Sequence[Sequence[_Member]], ctx: PassContext, limits: Bucketing) -> str:
    alone = sum(_seconds(member.node, member.sent, ctx) for bucket in possible for member in bucket)
    together = sum(_seconds(bucket[0].node, sum(member.sent for member in bucket), ctx) for bucket in possible)
    return (
        f"{sum(map(len, possible))} collectives are not bucketed: predicted {1000 * alone:.4g} ms separately and "
        f"{1000 * together:.4g} ms in {len(possible)} buckets, where each waits for all; merging two saves latency of "
        f"less than {limits.latency_share:g} of their transfer time"
    )
