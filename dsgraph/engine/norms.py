"""The global norm of gradients, of which each rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from dsgraph.inductor_ext import Ranks, sum_over
from dsgraph.partitioning.table import PartitionedModel, ShardedParameter

from .integrations.mpu import ModelParallel


def gradients(partition: PartitionedModel) -> list[tuple[ShardedParameter, Tensor]]:
    """The parameters that have a gradient, each with this rank's rows of it."""
    found = [(entry, entry.param.grad) for entry in partition.parameters]
    return [(entry, grad.to_local()) for entry, grad in found if grad is not None]  # type: ignore[attr-defined]


def global_norm(
    parts: Sequence[tuple[ShardedParameter, Tensor]],
    partition: PartitionedModel,
    shared: ModelParallel | None = None,
) -> float:
    """The 2-norm of all gradients as one vector; not finite where one of them is not.

    Rows of shards count on the rank that holds them, replicated gradients once. All ranks call it together: one number
    travels, and the host waits for it once.

    Args:
        parts: What `gradients` gives.
        partition: The model.
        shared: The ranks that hold slices of parameters, which count on each of them.
    """
    if shared is None:
        return math.sqrt(_total_square(parts, partition))
    alike = [(entry, grad) for entry, grad in parts if entry.name not in shared.sliced]
    sliced = torch.tensor(
        _total_square([part for part in parts if part[0].name in shared.sliced], partition),
        dtype=torch.float64,
        device=partition.parameters[0].param.device,
    )
    dist.all_reduce(sliced, group=shared.group)
    return math.sqrt(float(sliced) + _total_square(alike, partition))


def _total_square(parts: Sequence[tuple[ShardedParameter, Tensor]], partition: PartitionedModel) -> float:
    """The square of the norm over the ranks of the partition."""
    split = [grad for entry, grad in parts if entry.layout.group]
    replicated = [grad for entry, grad in parts if not entry.layout.group]
    device = partition.parameters[0].param.device
    total = _square(split, device)
    groups = dict.fromkeys(entry.layout.group for entry in partition.parameters if entry.layout.group)
    total = sum_over(total, [Ranks.of(group) for group in groups])
    return float(total + _square(replicated, device))


def _square(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return get_total_norm(list(parts)).to(torch.float64).square()


def scale_gradients(parts: Sequence[tuple[ShardedParameter, Tensor]], factor: float) -> None:
    """Multiplies this rank's rows of all gradients."""
    with torch.no_grad():
        for _, grad in parts:
            grad.mul_(factor)


def unscale_and_clip(
    partition: PartitionedModel, *, scale: float, largest: float, shared: ModelParallel | None = None
) -> float:
    """Divides gradients by the scale of the loss, and makes their norm at most `largest`.

    All ranks call it together. Where a gradient is not finite, all are left as they are.

    Args:
        partition: The model.
        scale: What the loss was multiplied by.
        largest: The largest norm; 0 for any.
        shared: See `global_norm`.

    Returns:
        The norm before it was clipped.
    """
    parts = gradients(partition)
    norm = global_norm(parts, partition, shared) / scale
    if not math.isfinite(norm):
        return norm
    factor = 1 / scale
    if largest and norm > largest:
        factor *= largest / (norm + 1e-6)
    if factor != 1:
        scale_gradients(parts, factor)
    return norm
