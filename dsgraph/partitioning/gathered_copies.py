"""Gathered copies of sharded parameters: their memory, and how they are fetched."""

from __future__ import annotations

import torch
from torch import Tensor

from dsgraph.compat.autograd import keeping_version
from dsgraph.compat.dynamo import keep_static
from dsgraph.inductor_ext import GATHERS, Ranks, backend_name, chunk_rows, resolve_group, sum_over, usual_gather

from .layout import Layout
from .parameter import Freshness, ParameterState
from .table import PartitionedModel


def new_copy(layout: Layout, shard: Tensor, partition: PartitionedModel) -> Tensor:
    """An empty full parameter, `[*layout.shape]` in the dtype that the forward sees.

    It knows its partition, so that a compiled graph that reads it can have it refreshed first. Its memory has room for
    equally many rows of each rank, so that it can be gathered in place.
    """
    dtype, _ = layout.dtypes(shard.dtype)
    rows, *rest = layout.shape
    world = resolve_group(layout.group).size()
    gathered_copy = torch.zeros((chunk_rows(rows, world) * world, *rest), dtype=dtype, device=shard.device)
    gathered_copy.resize_(layout.shape)  # which leaves the memory as it is
    keep_static(gathered_copy)
    gathered_copy.dsgraph_partition = partition  # type: ignore[attr-defined]
    return gathered_copy


def start_gathers(entries: list[ParameterState]) -> None:
    """Starts to fetch gathered copies, in the order of the model's parameters, which is mostly that of their use."""
    gathered_copies = tuple(entry.gathered_copy for entry in entries if entry.gathered_copy is not None)
    # What autograd saved of a gathered copy stays valid when the gathered copy is only fetched once more.
    with torch.no_grad(), keeping_version(gathered_copies):
        for entry in entries:
            _start_gather(entry)
    for entry, gathered_copy in zip(entries, gathered_copies, strict=True):
        if entry.freshness is Freshness.STALE:
            torch.autograd.graph.increment_version(gathered_copy)


def were_written(entries: list[ParameterState]) -> bool:
    """Whether the shards of any rank differ from what gathered copies were fetched from.

    That is how writes to `.data` are noticed, which leave no other trace. All ranks call it together: one number
    travels, and the host waits for it.
    """
    differ = False
    for entry in entries:
        _, own = _whole_and_own(entry)
        shard = entry.rows
        differ = differ or not torch.equal(own[: shard.shape[0]], shard.detach().to(own.dtype))
    found = torch.tensor(float(differ), device=entries[0].rows.device)
    groups = dict.fromkeys(entry.layout.group for entry in entries)
    return bool(sum_over(found, [Ranks.of(group) for group in groups]))


def _whole_and_own(entry: ParameterState) -> tuple[Tensor, Tensor]:
    """The memory of a gathered copy with equally many rows of each rank, and this rank's of them."""
    gathered_copy, layout = entry.gathered_copy, entry.layout
    assert gathered_copy is not None
    group = resolve_group(layout.group)
    rows = chunk_rows(layout.shape[0], group.size())
    whole = gathered_copy.detach().as_strided((rows * group.size(), *layout.shape[1:]), gathered_copy.stride())
    return whole, whole[group.rank() * rows :][:rows]


def _start_gather(entry: ParameterState) -> None:
    whole, own = _whole_and_own(entry)
    group = resolve_group(entry.layout.group)
    shard = entry.rows
    own[: shard.shape[0]].copy_(shard)  # so that the shard may be written to while they travel
    ranks = Ranks(entry.layout.group, group.size())
    kind = usual_gather(ranks, whole.device)
    started = GATHERS[kind](own, ranks, out=whole)
    if kind == "all_gather_into_tensor" and backend_name(group, whole.device.type) == "gloo":
        # It sends no messages from elsewhere, and two of its own gathers must not overlap.
        started.finish()
