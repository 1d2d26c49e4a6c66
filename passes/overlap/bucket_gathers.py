"""BucketForwardGathers, BucketBackwardGathers: neighbouring small parameters are gathered together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from dsgraph.passes.core.context import PassContext, Phase
from dsgraph.passes.core.graph_pass import PassResult
from dsgraph.passes.ir.coalesced import coalesce, results_of
from dsgraph.passes.ir.collectives import collectives, is_gather
from dsgraph.passes.ir.gathers import gathered_parameters
from dsgraph.passes.ir.graph import barrier_between, is_wait

from .buckets import Bucketing, fill


@dataclass(frozen=True)
class BucketForwardGathers(Bucketing):
    """Gather small parameters that are used one after the other together, if the saved latency is worth it.

    before:  a = wait_tensor(all_gather_into_tensor(shard_a)); y = mm(x, a)
             b = wait_tensor(all_gather_into_tensor(shard_b)); z = mm(y, b)
    after:   started = all_gather_into_tensor_coalesced([shard_a, shard_b])
             started_a = getitem(started, 0); started_b = getitem(started, 1)
             a = wait_tensor(started_a); y = mm(x, a)
             b = wait_tensor(started_b); z = mm(y, b)

    Each parameter has its own memory before and after, so nothing is copied into one buffer. Buckets follow the order
    of use: only neighbours of one group, dtype and kind share one. A bucket starts where its first member started, and
    each member is waited for where it was. Casts and padding of a shard move along. See `buckets` for the decision.
    Left alone: gathers of computed tensors, of a group outside the mesh, of dynamic sizes, gloo's own (see
    `gather_by_messages`), backends that may not start several at once; nothing moves across a barrier (an op that
    writes to an argument, or an unknown one).

    A bucket holds at most `bucket_bytes` of gathered parameters. It grows while a latency is at least `latency_share`
    of its transfer time, and on NCCL while a rank's part of it is small.
    """

    phase: ClassVar[Phase] = Phase.FORWARD
    conflicts: ClassVar[frozenset[str]] = frozenset({"prefetched-forward-gathers"})

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        movable = dict(gathered_parameters(gm, ctx.axes))

        def obstacle(bucket: Sequence[Node], node: Node) -> str | None:
            if node not in movable or bucket[0] not in movable:
                return "one of the two gathers a value that the graph computes"
            first, last = min(bucket), max(bucket)  # nothing stands in the way between these
            between = (last, node) if last < node else (node, first) if node < first else (node, node.next)
            stops = barrier_between(*between)
            return f"{stops.name} in between may write to it, or is unknown" if stops is not None else None

        ordered = sorted(filter(is_gather, collectives(gm)), key=_first_use)
        buckets, notes = fill(ordered, ctx, self, obstacle=obstacle)
        for bucket in buckets:
            place = min(bucket)
            for node in (node for member in bucket for node in movable[member] if place < node):
                place.prepend(node)
            coalesce(bucket, place)
        return PassResult(changed=sum(map(len, buckets)), notes=notes)


@dataclass(frozen=True)
class BucketBackwardGathers(BucketForwardGathers):
    """Gather small parameters together in the backward, in the order in which the backward uses them.

    before:  b = wait_tensor(all_gather_into_tensor(shard_b)); dy = mm(dz, t(b))
             a = wait_tensor(all_gather_into_tensor(shard_a)); dx = mm(dy, t(a))
    after:   started = all_gather_into_tensor_coalesced([shard_b, shard_a])
             b = wait_tensor(getitem(started, 0)); dy = mm(dz, t(b))
             a = wait_tensor(getitem(started, 1)); dx = mm(dy, t(a))
    """

    phase: ClassVar[Phase] = Phase.BACKWARD
    conflicts: ClassVar[frozenset[str]] = frozenset({"prefetched-backward-gathers"})


def _first_use(started: Node) -> Node:
    """Return the first wait for a gather."""
    return min((user for result in results_of(started) for user in result.users if is_wait(user)), default=started)
