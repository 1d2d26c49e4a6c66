"""Reduces the accumulated gradients that no graph has reduced, at the end of a step's last backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.inductor_ext import Ranks, sum_over
from dsgraph.partitioning.markers import reduce_gradient, start_reducing_gradient
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState

IN_FLIGHT_BYTES = 64 * 2**20
"""Bytes of gradients that are reduced at once; each of them is in memory twice."""


def used_anywhere(used_here: list[bool], state: PartitionState) -> list[bool]:
    """Return which parameters have a gradient on any rank. All ranks call it together."""
    if not used_here:
        return []
    device = state.parameters[0].param.device
    counts = torch.tensor(used_here, dtype=torch.int32, device=device)
    return (sum_over(counts, [Ranks.of(axis.group) for axis in state.axes]) > 0).tolist()


def reduce_split(grads: dict[ParameterState, Tensor | None]) -> list[tuple[ParameterState, Tensor]]:
    """Reduce gradients of sharded parameters, several at a time. Each is freed when it has been sent.

    Returns:
        This rank's rows of each gradient.
    """
    reduced: list[tuple[ParameterState, Tensor]] = []
    started: deque[tuple[ParameterState, int, Callable[[], Tensor]]] = deque()
    for entry in list(grads):
        grad = grads.pop(entry)
        assert grad is not None
        started.append((entry, grad.nbytes, start_reducing_gradient(entry.spec, grad, entry.rows)))
        del grad
        while sum(size for _, size, _ in started) > IN_FLIGHT_BYTES and len(started) > 1:
            first, _, finish = started.popleft()
            reduced.append((first, finish()))
    return reduced + [(entry, finish()) for entry, _, finish in started]


def reduce_replicated(
    bucket: Sequence[ParameterState], grads: Sequence[Tensor | None]
) -> list[tuple[ParameterState, Tensor]]:
    """Reduce gradients of replicated parameters in one bucket."""
    flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None])
    averaged = reduce_gradient(bucket[0].spec, flat, flat.new_empty(flat.shape, dtype=bucket[0].param.dtype))
    parts = averaged.split([entry.spec.numel for entry in bucket])
    # A tensor with a storage offset cannot be saved.
    return [(entry, part.clone().view(entry.spec.shape)) for entry, part in zip(bucket, parts, strict=True)]


def deliver(reduced: list[tuple[ParameterState, Tensor]]) -> None:
    """Add reduced gradients to the parameters' `.grad` in a separate backward, so that hooks are called.

    Args:
        reduced: This rank's rows of each gradient, in the same order on all ranks; it is emptied.
    """
    if not reduced:
        return
    params = [entry.param for entry, _ in reduced]
    frozen = [param.requires_grad_() for param in params if not param.requires_grad]  # frozen since a micro-batch
    try:
        with torch.enable_grad():
            _Deliver.apply(reduced, *params).backward()
    finally:
        for param in frozen:
            param.requires_grad_(False)


class _Deliver(torch.autograd.Function):
    """An autograd function of parameters whose backward returns the given gradients."""

    @staticmethod
    def forward(ctx: Any, reduced: list[tuple[ParameterState, Tensor]], *params: Tensor) -> Tensor:
        ctx.reduced = reduced
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values = [
            DTensor.from_local(
                rows, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
            for param, rows in ((entry.param, rows) for entry, rows in ctx.reduced)
        ]
        ctx.reduced.clear()  # autograd may then keep them without a copy
        return None, *values
