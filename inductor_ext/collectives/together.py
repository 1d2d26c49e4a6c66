"""Gathers and reduce-scatters of several tensors, started as a few collectives where the backend can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import backend_name, c10d_functional, register_work, resolve_group

from .algorithms import (
    COALESCING_BACKENDS,
    GATHERS,
    REDUCE_SCATTERS,
    Ranks,
    UnderWay,
    averaged,
    padded,
    usual_gather,
    usual_reduce_scatter,
)

# Number of collectives that gather all tensors of a group.
_PARTS = 3


def start_gathers_in_place(pieces: Sequence[tuple[Tensor, Tensor]], ranks: Ranks) -> None:
    """Start to gather tensors of which this rank's rows lie in their places; `wait_tensor` of each waits for it.

    A backend that can starts them as a few collectives, so that the first tensors arrive while others travel.

    Args:
        pieces: This rank's `[rows, ...]`, a part of the full tensor, and the full `[ranks.size * rows, ...]`.
        ranks: The ranks that hold the rows.
    """
    group, device = resolve_group(ranks.group), pieces[0][0].device
    if backend_name(group, device.type) not in COALESCING_BACKENDS:
        start = GATHERS[usual_gather(ranks, device)]
        for own, full in pieces:
            start(own, ranks, out=full)
        return
    size = math.ceil(len(pieces) / _PARTS)
    for first in range(0, len(pieces), size):
        part = pieces[first : first + size]
        work = group.allgather_into_tensor_coalesced([full for _, full in part], [own for own, _ in part])
        for _, full in part:
            register_work(full, work)


def start_reduce_scatters(wholes: Sequence[Tensor], ranks: Ranks) -> list[UnderWay]:
    """Start reduce-scatters of several tensors, as one collective where the backend can.

    Args:
        wholes: `[ranks.size * rows, ...]` each, of one dtype.
        ranks: The ranks that sum them.
    """
    if ranks.size == 1:
        return [UnderWay(partial(_same, whole)) for whole in wholes]
    device = wholes[0].device
    if backend_name(resolve_group(ranks.group), device.type) not in COALESCING_BACKENDS:
        start = REDUCE_SCATTERS[usual_reduce_scatter(ranks, device)]
        return [start(whole, ranks) for whole in wholes]
    sums = c10d_functional.reduce_scatter_tensor_coalesced(list(wholes), "sum", ranks.size, ranks.group)
    return [UnderWay(partial(c10d_functional.wait_tensor, each)) for each in sums]


def _same(whole: Tensor) -> Tensor:
    return whole


def start_reducing_together(
    grads: Sequence[Tensor],
    shard_shapes: Sequence[Sequence[int]],
    *,
    dtypes: Sequence[torch.dtype],
    reduce_dtype: torch.dtype,
    ranks: Ranks,
    outer: Sequence[Ranks],
) -> list[UnderWay]:
    """Start to average several gradients over `ranks`, as one collective where the backend can.

    Args:
        grads: `[rows, ...]` each, this rank's gradients.
        shard_shapes: Shapes of the results.
        dtypes: Dtypes of the results.
        reduce_dtype: Dtype of the sums over ranks.
        ranks: The ranks over which rows are sharded; a result of a single one may be the gradient itself.
        outer: Further groups over which results are summed.
    """
    started = start_reduce_scatters([padded(grad.to(reduce_dtype), ranks) for grad in grads], ranks)

    def finish(number: int) -> Tensor:
        own, shape = started[number].finish(), shard_shapes[number]
        return averaged(own, shape, dtype=dtypes[number], ranks=ranks, outer=outer)

    return [UnderWay(partial(finish, number)) for number in range(len(grads))]
