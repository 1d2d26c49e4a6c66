"""Reduces the accumulated gradients that no graph has reduced, at the end of a step's last backward."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.inductor_ext import Ranks, sum_over
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.state import PartitionState
from dsgraph.partitioning.step.reductions import Finish, start_reductions

IN_FLIGHT_BYTES = 64 * 2**20
"""Bytes of gradients that are reduced at once; each of them is in memory twice."""


def used_anywhere(used_here: list[bool], state: PartitionState) -> list[bool]:
    """Return which parameters have a gradient on any rank. All ranks call it together."""
    if not used_here:
        return []
    device = state.parameters[0].param.device
    counts = torch.tensor(used_here, dtype=torch.int32, device=device)
    return (sum_over(counts, [Ranks.of(axis.group) for axis in state.axes]) > 0).tolist()


def reduce_all(grads: dict[ParameterState, Tensor]) -> list[tuple[ParameterState, Tensor]]:
    """Reduce gradients: those of replicated parameters together, others several at a time.

    Args:
        grads: The full gradients, in the same order on all ranks. Each is removed when it has been sent.

    Returns:
        This rank's rows of each gradient.
    """
    replicated = [entry for entry in grads if not entry.spec.group]
    finishes = start_reductions([(entry, grads.pop(entry)) for entry in replicated])
    # A tensor with a storage offset cannot be saved.
    reduced = [(entry, finish()) for entry, finish in zip(replicated, finishes, strict=True)]
    started: deque[tuple[ParameterState, int, Finish]] = deque()
    for entry in list(grads):
        size = grads[entry].nbytes
        (finish,) = start_reductions([(entry, grads.pop(entry))])
        started.append((entry, size, finish))
        while sum(size for _, size, _ in started) > IN_FLIGHT_BYTES and len(started) > 1:
            first, _, finish = started.popleft()
            reduced.append((first, finish()))
    return reduced + [(entry, finish()) for entry, _, finish in started]


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
