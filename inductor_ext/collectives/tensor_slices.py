"""Slices of tensors over the ranks of a tensor-parallel group, with differentiable collectives between them.

A dimension of `parts` equal pieces is sliced piece by piece: rank r of n holds the r-th n-th of each, concatenated.
With `parts=1` that is the r-th n-th of the dimension; a fused product of queries, keys and values has three.

    gather_slices:  full = all slices, in order                 backward: this rank's slice of the gradient
    own_slice:      own  = this rank's slice of full            backward: the gradients of all slices, in order
    sum_slices:     sum  = sum over ranks of x                  backward: the gradient as it is
    enter_slices:   x    = x                                    backward: the sum over ranks of the gradient
    scatter_sum:    own  = this rank's slice of sum_slices(x)   backward: the gradients of all slices, in order
    gather_entered: x    = all slices, in order                 backward: this rank's slice of the summed gradient

`sum_slices` and `enter_slices` are the conjugate pair f, g of Shoeybi et al.: Megatron-LM, arXiv 1909.08053, section 3;
the last two are the pair of Korthikanti et al.: arXiv 2205.05198, section 4.2.2. All are correct if a
replicated value has the same gradient on every rank, and a slice the gradient of that slice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import c10d_functional, resolve_group
from dsgraph.inductor_ext.ops import define_op


def slice_of(full: Tensor, dim: int, *, parts: int, ranks: int, rank: int) -> Tensor:
    """Return one rank's slice.

    Args:
        full: `[..., size, ...]`, whose `size` at `dim` is divisible by `parts * ranks`.
        dim: The sliced dimension, 0 or more.
        parts: Number of its equal pieces.
        ranks: Number of ranks.
        rank: The rank of the slice.

    Returns:
        `[..., size / ranks, ...]`, in memory of its own.
    """
    pieces = full.unflatten(dim, (parts, ranks, full.shape[dim] // (parts * ranks)))
    return pieces.select(dim + 1, rank).flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


def join_slices(stacked: Tensor, dim: int, *, parts: int) -> Tensor:
    """Return the full tensor of all slices.

    Args:
        stacked: `[ranks, ..., size / ranks, ...]`.
        dim: The sliced dimension of the full tensor.
        parts: Number of its equal pieces.

    Returns:
        `[..., size, ...]`, a new tensor.
    """
    pieces = stacked.movedim(0, dim).unflatten(dim + 1, (parts, stacked.shape[dim + 1] // parts))
    return pieces.movedim(dim, dim + 1).flatten(dim, dim + 2).clone(memory_format=torch.contiguous_format)


def lowered_sum(x: Tensor, group: str) -> Tensor:
    """Return `sum_slices`, computed by functional collectives that a tracer sees."""
    return c10d_functional.wait_tensor(c10d_functional.all_reduce(x, "sum", group))


def lowered_gather(own: Tensor, dim: int, parts: int, ranks: int, group: str) -> Tensor:
    """Return `gather_slices`, computed by functional collectives that a tracer sees."""
    stacked = c10d_functional.all_gather_into_tensor(own.contiguous(), ranks, group)
    return join_slices(c10d_functional.wait_tensor(stacked).view(ranks, *own.shape), dim, parts=parts)


def lowered_scatter(x: Tensor, dim: int, parts: int, ranks: int, group: str) -> Tensor:
    """Return `scatter_sum`, computed by functional collectives that a tracer sees."""
    pieces = x.unflatten(dim, (parts, ranks, x.shape[dim] // (parts * ranks))).movedim(dim + 1, 0)
    stacked = pieces.flatten(dim + 1, dim + 2).contiguous()
    own = c10d_functional.reduce_scatter_tensor(stacked.flatten(0, 1), "sum", ranks, group)
    return c10d_functional.wait_tensor(own).view(stacked.shape[1:])


def _gathered(own: Tensor, dim: int, parts: int, ranks: int, group: str) -> Tensor:
    shape = list(own.shape)
    shape[dim] = shape[dim] * ranks
    return own.new_empty(shape)


@define_op(fake=_gathered)
def gather_slices(own: Tensor, dim: int, parts: int, ranks: int, group: str) -> Tensor:
    """Return the full tensor of which `own` is this rank's slice.

    Args:
        own: `[..., size / ranks, ...]`.
        dim: The sliced dimension.
        parts: Number of its equal pieces.
        ranks: Number of ranks of the group.
        group: Name of the process group.

    Returns:
        `[..., size, ...]`.
    """
    return lowered_gather(own, dim, parts, ranks, group)


def _sliced(full: Tensor, dim: int, parts: int, ranks: int, group: str) -> Tensor:
    shape = list(full.shape)
    shape[dim] = shape[dim] // ranks
    return full.new_empty(shape)


@define_op(fake=_sliced)
def own_slice(full: Tensor, dim: int, parts: int, ranks: int, group: str) -> Tensor:
    """Return this rank's slice of a replicated tensor; arguments as for `gather_slices`, in reverse."""
    return slice_of(full, dim, parts=parts, ranks=ranks, rank=resolve_group(group).rank())


def _like(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


@define_op(fake=_like)
def sum_slices(x: Tensor, group: str) -> Tensor:
    """Return the sum of `x` over the ranks of `group`, of the same shape."""
    return lowered_sum(x, group).clone()


@define_op(fake=_like)
def enter_slices(x: Tensor, group: str) -> Tensor:
    """Return a copy of `x`, whose gradient is summed over the ranks of `group`."""
    return x.clone()


@define_op(fake=_sliced)
def scatter_sum(x: Tensor, dim: int, parts: int, ranks: int, group: str) -> Tensor:
    """Return this rank's slice of the sum of `x` over the ranks of `group`; arguments as for `own_slice`."""
    return lowered_scatter(x, dim, parts, ranks, group).clone()


@define_op(fake=_gathered)
def gather_entered(own: Tensor, dim: int, parts: int, ranks: int, group: str) -> Tensor:
    """Return the full tensor, whose gradient is summed over ranks and sliced; arguments as for `gather_slices`."""
    return lowered_gather(own, dim, parts, ranks, group)


def _note_slice(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.slice = inputs[1:]


def _note_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group = inputs


def _slice_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.dsgraph.own_slice(grad, *ctx.slice), None, None, None, None


def _gather_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.dsgraph.gather_slices(grad, *ctx.slice), None, None, None, None


def _pass_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, None


def _scatter_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.dsgraph.scatter_sum(grad, *ctx.slice), None, None, None, None


def _gather_entered_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.dsgraph.gather_entered(grad, *ctx.slice), None, None, None, None


def _sum_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.dsgraph.sum_slices(grad, ctx.group), None


gather_slices.register_autograd(_slice_back, setup_context=_note_slice)
own_slice.register_autograd(_gather_back, setup_context=_note_slice)
sum_slices.register_autograd(_pass_back, setup_context=_note_group)
enter_slices.register_autograd(_sum_back, setup_context=_note_group)
scatter_sum.register_autograd(_gather_entered_back, setup_context=_note_slice)
gather_entered.register_autograd(_scatter_back, setup_context=_note_slice)
