"""BucketReductions: neighbouring small gradients are reduced together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import PassResult
from dsgraph.passes.ir.coalesced import coalesce, results_of
from dsgraph.passes.ir.collectives import collectives, is_reduction
from dsgraph.passes.ir.gathers import made_of
from dsgraph.passes.ir.graph import barrier_between

from .buckets import Bucketing, fill


@dataclass(frozen=True)
class BucketReductions(Bucketing):
    """Reduce and scatter neighbouring small gradients together, if the saved latency is worth it.

    before:  da = mm(x, dy); own_a = wait_tensor(reduce_scatter_tensor(da))
             db = mm(u, dv); own_b = wait_tensor(reduce_scatter_tensor(db))
    after:   da = mm(x, dy); db = mm(u, dv)
             started = reduce_scatter_tensor_coalesced([da, db])
             started_a = getitem(started, 0); started_b = getitem(started, 1)
             own_a = wait_tensor(started_a); own_b = wait_tensor(started_b)

    Gradients are read from their own memory, so nothing is copied into one buffer, and each sum is the same bit for
    bit. Only neighbours of one group, dtype and kind share a bucket; it starts when the last gradient is ready, and
    nodes that depend only on the others' results (waits, sums over ranks, averages, slices) move after it. See
    `buckets` for the decision. Left alone: all-reduces (see `BucketSmallReductions`), a result that the backward
    computes with or communicates again, as in hybrid sharding, unless it is the last of its bucket; backends that may
    not start several at once. Nothing moves across a barrier (an op that writes to an argument, or an unknown one).

    A bucket holds at most `bucket_bytes` of gradients. It grows while a latency is at least `latency_share` of its
    transfer time, and on NCCL while a rank's part of it is small.
    """

    phase: ClassVar[Phase] = Phase.BACKWARD
    conflicts: ClassVar[frozenset[str]] = frozenset({"delayed-reduction-waits"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        reductions = list(filter(is_reduction, collectives(gm)))
        buckets, notes = fill(reductions, ctx, self, obstacle=_obstacle)
        for bucket in buckets:
            _reduce_together(bucket)
        return PassResult(changed=sum(map(len, buckets)), notes=notes)


def _obstacle(bucket: Sequence[Node], node: Node) -> str | None:
    results = made_of(bucket[-1])
    if isinstance(results, str):
        return results
    stops = barrier_between(bucket[-1], node)
    return f"{stops.name} in between may write to it, or is unknown" if stops is not None else None


def _reduce_together(bucket: Sequence[Node]) -> None:
    place = bucket[-1]
    behind = [node for member in bucket[:-1] for node in made_of(member) if isinstance(node, Node) and node < place]
    last = results_of(coalesce(bucket, place))[-1]
    for node in behind:
        last.append(node)
        last = node
