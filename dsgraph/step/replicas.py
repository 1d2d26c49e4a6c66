"""Gathered copies of sharded parameters: their memory, and how they are fetched."""

from __future__ import annotations

import torch
from torch import Tensor

from dsgraph import compat
from dsgraph.inductor_ext import GATHERS, Ranks, backend_name, chunk_rows, resolve_group, usual_gather
from dsgraph.sharding.layout import Layout
from dsgraph.sharding.table import PartitionedModel

from .parameter import Freshness, ParameterState


def new_replica(layout: Layout, shard: Tensor, partition: PartitionedModel) -> Tensor:
    """An empty full parameter, `[*layout.shape]` in the dtype that the forward sees.

    It knows its partition, so that a compiled graph that reads it can have it refreshed first. Its memory has room for
    equally many rows of each rank, so that it can be gathered in place.
    """
    dtype, _ = layout.dtypes(shard.dtype)
    rows, *rest = layout.shape
    world = resolve_group(layout.group).size()
    replica = torch.zeros((chunk_rows(rows, world) * world, *rest), dtype=dtype, device=shard.device)
    replica.resize_(layout.shape)  # which leaves the memory as it is
    compat.keep_static(replica)
    replica.dsgraph_partition = partition  # type: ignore[attr-defined]
    return replica


def start_gathers(entries: list[ParameterState]) -> None:
    """Starts to fetch replicas, in the order of the model's parameters, which is mostly that of their use."""
    replicas = tuple(entry.replica for entry in entries if entry.replica is not None)
    # What autograd saved of a replica stays valid when the replica is only fetched once more.
    with torch.no_grad(), compat.keeping_version(replicas):
        for entry in entries:
            _start_gather(entry)
    for entry, replica in zip(entries, replicas, strict=True):
        if entry.freshness is Freshness.STALE:
            torch.autograd.graph.increment_version(replica)


def _start_gather(entry: ParameterState) -> None:
    replica, layout = entry.replica, entry.layout
    assert replica is not None
    group = resolve_group(layout.group)
    world = group.size()
    rows = chunk_rows(layout.shape[0], world)
    whole = replica.detach().as_strided((rows * world, *layout.shape[1:]), replica.stride())
    own = whole[group.rank() * rows :][:rows]
    shard = entry.param.to_local().detach()
    own[: shard.shape[0]].copy_(shard)  # so that the shard may be written to while they travel
    ranks = Ranks(layout.group, world)
    kind = usual_gather(ranks, replica.device)
    started = GATHERS[kind](own, ranks, out=whole)
    if kind == "all_gather_into_tensor" and backend_name(group, replica.device.type) == "gloo":
        # It sends no messages from elsewhere, and two of its own gathers must not overlap.
        started.finish()
