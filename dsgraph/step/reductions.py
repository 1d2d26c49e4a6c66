"""Reduces what no graph has: accumulated gradients, when the last backward of a step is through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.inductor_ext import Ranks, sum_over
from dsgraph.sharding.compressed import reduce_compressed

from .parameter import ParameterState
from .state import PartitionState

# How much is under way at once when sums are reduced: what travels is there twice.
_IN_FLIGHT_BYTES = 64 * 2**20


def used_anywhere(used_here: list[bool], state: PartitionState) -> list[bool]:
    """Which parameters have a gradient on any rank. All ranks call it together."""
    if not used_here:
        return []
    device = state.parameters[0].param.device
    counts = torch.tensor(used_here, dtype=torch.int32, device=device)
    return (sum_over(counts, [Ranks.of(axis.group) for axis in state.axes]) > 0).tolist()


def reduce_split(grads: dict[ParameterState, Tensor | None]) -> None:
    """Reduces gradients of split parameters, several on their way at once. Each is freed when it has been added."""
    started: deque[tuple[ParameterState, int, Callable[[], Tensor]]] = deque()
    for entry in list(grads):
        grad = grads.pop(entry)
        assert grad is not None
        started.append((entry, grad.nbytes, entry.layout.start_reducing(grad, entry.rows)))
        del grad
        while sum(size for _, size, _ in started) > _IN_FLIGHT_BYTES and len(started) > 1:
            first, _, finish = started.popleft()
            _add_gradient(first, finish())
    for entry, _, finish in started:
        _add_gradient(entry, finish())


def reduce_replicated(bucket: Sequence[ParameterState], grads: Sequence[Tensor | None]) -> None:
    """Reduces gradients of parameters that every rank holds whole, as one."""
    flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None])
    averaged = bucket[0].layout.reduce(flat, flat.new_empty(flat.shape, dtype=bucket[0].param.dtype))
    sizes = [entry.param.numel() for entry in bucket]
    for entry, part in zip(bucket, averaged.split(sizes), strict=True):
        _add_gradient(entry, part.clone().view(entry.layout.shape))  # what begins amid other memory cannot be saved


def reduce_as_momentum(entry: ParameterState, grad: Tensor | None) -> None:
    """Lets a compressed parameter's momentum take in a gradient."""
    assert entry.compression is not None and grad is not None
    entry.compression.note_arrival()
    _add_gradient(entry, reduce_compressed(grad, entry.rows, entry.compression.inputs, entry.layout.reduced_over))


def _add_gradient(entry: ParameterState, grad: Tensor) -> None:
    param = entry.param
    with torch.no_grad():
        value = DTensor.from_local(
            grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        param.grad = value if param.grad is None else param.grad + value
