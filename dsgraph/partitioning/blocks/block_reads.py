"""The parameters that a block's graphs read, and the reduction of their gradients outside the graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dsgraph.compat.autograd import accumulates, has_hooks, is_accumulation
from dsgraph.compat.dtensor import distributed_like
from dsgraph.inductor_ext import Ranks, c10d_functional, start_reducing_together, sum_over
from dsgraph.partitioning.markers import start_reducing_gradient
from dsgraph.partitioning.parameter import ParameterState

Finish = Callable[[], Tensor]
"""A function that waits for a running reduction and returns this rank's rows of the gradient."""


@dataclass(frozen=True)
class RunningReduction:
    """The reduction of a gradient that has been started.

    Attributes:
        param: The parameter whose `.grad` gets the result.
        finish: Waits for it and returns this rank's rows.
    """

    param: DTensor
    finish: Finish

    @torch.no_grad()
    def add(self) -> None:
        """Wait for the result and add it to the parameter's `.grad`, as autograd would."""
        grad = distributed_like(self.param, self.finish())
        if not self.param.requires_grad:  # frozen since the forward
            return
        if self.param.grad is None:
            self.param.grad = grad
        else:
            self.param.grad.add_(grad)


Hand = Callable[[Sequence[RunningReduction]], None]
"""A function that takes over running reductions, to be finished at the end of the backward at the latest."""

Start = Callable[[Sequence[tuple[ParameterState, Tensor]]], list[Finish]]


def read_in_place(
    entries: Sequence[ParameterState], full: Sequence[Tensor], *, start: Start, hand: Hand
) -> list[Tensor]:
    """Return full parameters, differentiable with respect to their shards.

    Args:
        entries: The parameters, all of which require a gradient.
        full: Their full values, which share memory with the result.
        start: Starts the reductions of gradients.
        hand: Takes over those whose result can come later.
    """
    return list(_InPlace.apply(tuple(entries), tuple(full), start, hand, *(entry.param for entry in entries)))


class _InPlace(torch.autograd.Function):
    """An autograd function that returns full parameters in place of their shards.

    The reductions of all gradients start together. A gradient that only goes to the parameter's `.grad` is handed over.
    Others are waited for, such as those that hooks or `torch.autograd.grad` get.
    """

    @staticmethod
    def forward(
        ctx: Any,
        entries: Sequence[ParameterState],
        full: Sequence[Tensor],
        start: Start,
        hand: Hand,
        *params: DTensor,
    ) -> tuple[Tensor, ...]:
        ctx.entries, ctx.start, ctx.hand = entries, start, hand
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.keeps_graph = torch.is_grad_enabled()  # so that `_reduce`'s results refuse a second derivative
        return _InPlace._reduce(ctx, *grads)

    @staticmethod
    @once_differentiable
    def _reduce(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None] * len(grads)
        nodes = [node for node, _ in ctx.next_functions]
        needed = [number for number, grad in enumerate(grads) if grad is not None and ctx.needs_input_grad[4 + number]]
        finishes = ctx.start([(ctx.entries[number], grads[number]) for number in needed])
        handed = []
        for number, finish in zip(needed, finishes, strict=True):
            node, entry = nodes[number], ctx.entries[number]
            if not ctx.keeps_graph and only_adds(node):
                handed.append(RunningReduction(node.variable, finish))
            else:
                results[number] = distributed_like(entry.param, finish())
        ctx.hand(handed)
        return (None, None, None, None, *results)


def only_adds(node: Any) -> bool:
    """Return True for the node of a parameter that adds the gradient to `.grad`, and does nothing else with it."""
    return is_accumulation(node) and accumulates(node) and not has_hooks(node.variable)


def start_reductions(pairs: Sequence[tuple[ParameterState, Tensor]]) -> list[Finish]:
    """Start the reductions of full gradients; those of replicated parameters go together, on NCCL all others as well.

    Sums over several groups are finished here, in the same order on all ranks: a rank with a hook waits earlier than
    the others.

    Args:
        pairs: Parameters, each with its gradient `[*shape]`, in the same order on all ranks.
    """
    finishes: dict[int, Finish] = {}
    together: dict[tuple[str, tuple[str, ...], torch.dtype], list[int]] = {}
    for number, (entry, _) in enumerate(pairs):
        _, reduce_dtype = entry.spec.dtypes(entry.param.dtype)
        key = entry.spec.group, tuple(entry.spec.outer_groups), reduce_dtype
        together.setdefault(key, []).append(number)
    for (group, outer, dtype), numbers in together.items():
        own = [pairs[number] for number in numbers]
        started = _start_sharded(own, group, outer, dtype) if group else _start_replicated(own, outer, dtype)
        finishes |= zip(numbers, started, strict=True)
    for number, (entry, _) in enumerate(pairs):
        later = _large(entry.spec.outer_groups) if entry.spec.group else _large(entry.spec.outer_groups)[1:]
        if later:
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
    if Ranks.of(group).size == 1:
        return [_start_of_one_rank(entry, grad) for entry, grad in pairs]
    started = start_reducing_together(
        [grad for _, grad in pairs],
        [entry.rows.shape for entry, _ in pairs],
        dtypes=[entry.rows.dtype for entry, _ in pairs],
        reduce_dtype=dtype,
        ranks=Ranks.of(group),
        outer=[Ranks.of(name) for name in outer_groups],
    )
    return [each.finish for each in started]


def _start_of_one_rank(entry: ParameterState, grad: Tensor) -> Finish:
    """Start to average a gradient of which this rank has all rows."""
    finish = start_reducing_gradient(entry.spec, grad, entry.rows)
    if _large(entry.spec.outer_groups):
        return finish
    return lambda: finish().clone()  # several parameters may have one gradient


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
