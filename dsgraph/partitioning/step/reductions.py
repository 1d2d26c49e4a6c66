"""The reduction of gradients outside graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.compat.autograd import accumulates, has_hooks, is_accumulation
from dsgraph.compat.dtensor import distributed_like
from dsgraph.inductor_ext import Ranks, c10d_functional, start_reducing_together, sum_over
from dsgraph.partitioning.markers import reduction_options
from dsgraph.partitioning.parameter import ParameterState

Finish = Callable[[], Tensor]
"""A function that waits for a running reduction and returns this rank's rows of the gradient."""


@torch.no_grad()
def add_gradient(param: DTensor, rows: Tensor) -> None:
    """Add this rank's rows of a reduced gradient to a parameter's `.grad`, as autograd would."""
    if not param.requires_grad:  # frozen since the forward
        return
    if param.grad is None:
        param.grad = distributed_like(param, rows)
    else:
        param.grad.add_(distributed_like(param, rows))


def only_adds(node: Any) -> bool:
    """Return True for the node of a parameter that adds the gradient to `.grad`, and does nothing else with it."""
    is_watched = has_hooks(node.variable) if is_accumulation(node) else True
    return not is_watched and accumulates(node) and not torch.is_anomaly_enabled()


def start_reductions(pairs: Sequence[tuple[ParameterState, Tensor]]) -> list[Finish]:
    """Start the reductions of full gradients; those of replicated parameters go together, on NCCL all others as well.

    Sums over several groups are finished here, in the same order on all ranks: a rank with a hook waits earlier than
    the others.

    Args:
        pairs: Parameters, each with its gradient `[*shape]`, in the same order on all ranks.
    """
    finishes: dict[int, Finish] = {}
    together: dict[tuple[str, tuple[str, ...], torch.dtype], list[int]] = {}
    for number, (entry, grad) in enumerate(pairs):
        if entry.reducer is not None:
            options = reduction_options(entry.spec, entry.param.dtype)
            finishes[number] = partial(_given, entry.reducer.reduce(grad, entry.rows, **options))
            continue
        _, reduce_dtype = entry.spec.dtypes(entry.param.dtype)
        key = entry.spec.group, tuple(entry.spec.outer_groups), reduce_dtype
        together.setdefault(key, []).append(number)
    for (group, outer, dtype), numbers in together.items():
        own = [pairs[number] for number in numbers]
        started = _start_sharded(own, group, outer, dtype) if group else _start_replicated(own, outer, dtype)
        finishes |= zip(numbers, started, strict=True)
    for number, (entry, _) in enumerate(pairs):
        later = _large(entry.spec.outer_groups) if entry.spec.group else _large(entry.spec.outer_groups)[1:]
        if later and entry.reducer is None:
            finishes[number] = partial(_given, finishes[number]())
    return [finishes[number] for number in range(len(pairs))]


def _large(groups: Sequence[str]) -> list[Ranks]:
    """Return the groups of more than one rank."""
    return [ranks for ranks in map(Ranks.of, groups) if ranks.size > 1]


def _given(value: Tensor) -> Tensor:
    return value


def _start_sharded(
    pairs: Sequence[tuple[ParameterState, Tensor]], group: str, outer_groups: Sequence[str], dtype: torch.dtype
) -> list[Finish]:
    """Start to average the gradients of sharded parameters."""
    ranks = Ranks.of(group)
    started = start_reducing_together(
        [grad for _, grad in pairs],
        [entry.rows.shape for entry, _ in pairs],
        dtypes=[entry.rows.dtype for entry, _ in pairs],
        reduce_dtype=dtype,
        ranks=ranks,
        outer=[Ranks.of(name) for name in outer_groups],
    )
    if ranks.size > 1:
        return [each.finish for each in started]
    return [partial(_own, each.finish) for each in started]


def _own(finish: Finish) -> Tensor:
    return finish().clone()  # several parameters may have one gradient


def _start_replicated(
    pairs: Sequence[tuple[ParameterState, Tensor]], groups: Sequence[str], dtype: torch.dtype
) -> list[Finish]:
    """Start to average the gradients of replicated parameters as one tensor."""
    ranks = _large(groups)
    flat = torch.cat([grad.detach().reshape(-1).to(dtype) for _, grad in pairs])
    if ranks:
        flat = c10d_functional.all_reduce(flat, "sum", ranks[0].group)
    parts: list[Tensor] = []

    def finish(entry: ParameterState, shape: torch.Size, number: int) -> Tensor:
        if not parts:
            total = sum_over(c10d_functional.wait_tensor(flat), ranks[1:]) if ranks else flat
            mean = total / math.prod(each.size for each in ranks) if ranks else total
            parts.extend(mean.split(sizes))
        return parts[number].view(shape).to(entry.param.dtype, copy=True)

    sizes = [grad.numel() for _, grad in pairs]
    return [partial(finish, entry, grad.shape, number) for number, (entry, grad) in enumerate(pairs)]
