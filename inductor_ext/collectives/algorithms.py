"""Algorithms of gathers and reductions: plain functions that run eagerly and are traced into graphs.

For n ranks of which each holds a chunk of rows (`torch.chunk`'s rule, shorter chunks padded with zeros):

    gather:          full   = concat(chunk_0, ..., chunk_{n-1})
    exchange:        rows_r = concat over n ranks, in their order, of chunk_r(grad)
    reduce-scatter:  own_r  = sum over n ranks, in their order, of chunk_r(grad)

Each *algorithm* does one of them for chunks of equal size; `GATHERS`, `EXCHANGES` and `REDUCE_SCATTERS` have them by
the kind of collective that they run. The code around them (casts, padding, averages) is written once, for all. A start
returns the running operation, so that more can start before it is finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import backend_name, c10d_functional, resolve_group

from .gather_by_messages import start_gather
from .messages import sends_messages

# Backends that can start several collectives as one.
COALESCING_BACKENDS = ("nccl", "fake")


@dataclass(frozen=True)
class Ranks:
    """A process group, by its name, and its number of ranks."""

    group: str
    size: int

    @staticmethod
    def of(group: str) -> Ranks:
        """Return the ranks of an existing group; "" is this rank alone."""
        return Ranks(group, resolve_group(group).size() if group else 1)


@dataclass(frozen=True)
class UnderWay:
    """An operation that has been started.

    Attributes:
        finish: Waits for it and returns the result; to be called once.
    """

    finish: Callable[[], Tensor]


class Gather(Protocol):
    """A function that starts to gather the `[rows, ...]` of every rank."""

    def __call__(self, rows: Tensor, ranks: Ranks, *, out: Tensor | None = None) -> UnderWay:
        """Start a gather with the result `[ranks.size * rows, ...]`, in `out` if given.

        `rows` may be a part of `out`.
        """


class Exchange(Protocol):
    """A function that starts to send each rank its rows of the `[ranks * rows, ...]` of every rank."""

    def __call__(self, whole: Tensor, ranks: Ranks) -> UnderWay:
        """Start an exchange with the result `[ranks * rows, ...]`: the values from each rank, in rank order."""


class ReduceScatter(Protocol):
    """A function that starts to sum the `[ranks * rows, ...]` of every rank and to send each rank its rows."""

    def __call__(self, whole: Tensor, ranks: Ranks) -> UnderWay:
        """Start a reduce-scatter with the result `[rows, ...]`."""


def _gather(rows: Tensor, ranks: Ranks, *, out: Tensor | None = None) -> UnderWay:
    if out is None:
        full = c10d_functional.all_gather_into_tensor(rows, ranks.size, ranks.group)
        return UnderWay(lambda: c10d_functional.wait_tensor(full))
    c10d_functional.all_gather_into_tensor_out(rows, ranks.size, ranks.group, out=out)
    return UnderWay(lambda: c10d_functional.wait_tensor(out))


def _gather_by_messages(rows: Tensor, ranks: Ranks, *, out: Tensor | None = None) -> UnderWay:
    if out is None:
        full = torch.ops.dsgraph.gather_by_messages(rows, ranks.size, ranks.group)
        return UnderWay(lambda: c10d_functional.wait_tensor(full))
    start_gather(rows, out, ranks.group)
    return UnderWay(lambda: c10d_functional.wait_tensor(out))


def _reduce_scatter(whole: Tensor, ranks: Ranks) -> UnderWay:
    own = c10d_functional.reduce_scatter_tensor(whole, "sum", ranks.size, ranks.group)
    return UnderWay(lambda: c10d_functional.wait_tensor(own))


def _exchange_by_messages(whole: Tensor, ranks: Ranks) -> UnderWay:
    received = torch.ops.dsgraph.exchange_by_messages(whole, ranks.size, ranks.group)
    return UnderWay(lambda: c10d_functional.wait_tensor(received))


def _all_to_all(whole: Tensor, ranks: Ranks) -> UnderWay:
    sizes = [whole.shape[0] // ranks.size] * ranks.size
    received = c10d_functional.all_to_all_single(whole, sizes, sizes, ranks.group)
    return UnderWay(lambda: c10d_functional.wait_tensor(received))


def _added_up(exchange: Exchange) -> ReduceScatter:
    def reduce_scatter(whole: Tensor, ranks: Ranks) -> UnderWay:
        started = exchange(whole, ranks)
        return UnderWay(lambda: _add_up(started.finish(), ranks))

    return reduce_scatter


def _add_up(received: Tensor, ranks: Ranks) -> Tensor:
    """Return the sum of the rows that each rank has sent, in rank order."""
    by_rank = received.view(ranks.size, received.shape[0] // ranks.size, *received.shape[1:])
    return by_rank.sum(0, dtype=received.dtype)  # named, because a sum of integers would be of int64 otherwise


GATHERS: Mapping[str, Gather] = MappingProxyType(
    {"all_gather_into_tensor": _gather, "gather_by_messages": _gather_by_messages}
)
EXCHANGES: Mapping[str, Exchange] = MappingProxyType(
    {"exchange_by_messages": _exchange_by_messages, "all_to_all_single": _all_to_all}
)
REDUCE_SCATTERS: Mapping[str, ReduceScatter] = MappingProxyType(
    {"reduce_scatter_tensor": _reduce_scatter, **{kind: _added_up(each) for kind, each in EXCHANGES.items()}}
)


def usual_gather(ranks: Ranks, device: torch.device) -> str:
    """Return the kind of gather used by default, of which several may run at once: on gloo `gather_by_messages`."""
    is_gloo = backend_name(resolve_group(ranks.group), device.type) == "gloo"
    return "gather_by_messages" if is_gloo else "all_gather_into_tensor"


def usual_reduce_scatter(ranks: Ranks, device: torch.device) -> str:
    """Return the default kind of reduce-scatter: messages on gloo, whose own is an all-reduce of everything."""
    by_messages = sends_messages(resolve_group(ranks.group), device)
    return "exchange_by_messages" if by_messages else "reduce_scatter_tensor"


def usual_exchange(ranks: Ranks, device: torch.device) -> str:
    """Return the default kind of exchange: messages on gloo."""
    by_messages = sends_messages(resolve_group(ranks.group), device)
    return "exchange_by_messages" if by_messages else "all_to_all_single"


def chunk_rows(rows: int, world: int) -> int:
    """Return the rows of the largest of `world` chunks, which every rank sends: shorter chunks are padded to it."""
    return -(-rows // world)


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return `tensor` with zero rows appended up to `rows`; `tensor` itself (made contiguous) if it has them."""
    missing = rows - tensor.shape[0]
    if missing:
        padding = [0, 0] * (tensor.dim() - 1) + [0, missing]  # last dimension first
        tensor = torch.constant_pad_nd(tensor, padding)
    return tensor.contiguous()


def take_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return the first `rows` of `tensor`; `tensor` itself if it has no more."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def start_gather_rows(
    shard: Tensor, shape: Sequence[int], ranks: Ranks, *, dtype: torch.dtype, by: str = "all_gather_into_tensor"
) -> UnderWay:
    """Start to gather a tensor of which each rank holds a chunk of rows.

    Args:
        shard: `[rows_r, ...]`, this rank's rows.
        shape: Shape of the result.
        ranks: The ranks; with a single one nothing is gathered, and the result may be `shard` itself.
        dtype: Dtype of the result. The cast comes first, so that fewer bytes are sent.
        by: A key of `GATHERS`.
    """
    own = shard.to(dtype)
    if ranks.size == 1:
        return UnderWay(lambda: own)
    started = GATHERS[by](pad_rows(own, chunk_rows(shape[0], ranks.size)), ranks)
    return replace(started, finish=lambda: take_rows(started.finish(), shape[0]))


def start_reducing(
    grad: Tensor,
    shard_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    ranks: Ranks,
    outer: Sequence[Ranks],
    by: str = "reduce_scatter_tensor",
) -> UnderWay:
    """Start to average a gradient over `ranks`; `finish` does the rest.

    Args:
        grad: `[rows, ...]`, this rank's gradient.
        shard_shape: Shape of the result, the rows that this rank keeps.
        dtype: Dtype of the result.
        reduce_dtype: Dtype of the sum over ranks.
        ranks: The ranks over which rows are sharded; with a single one they are not.
        outer: Further groups over which the result is summed.
        by: A key of `REDUCE_SCATTERS`.
    """
    summed = grad.to(reduce_dtype)
    started = REDUCE_SCATTERS[by](padded(summed, ranks), ranks) if ranks.size > 1 else UnderWay(lambda: summed)
    return UnderWay(lambda: averaged(started.finish(), shard_shape, dtype=dtype, ranks=ranks, outer=outer))


def padded(grad: Tensor, ranks: Ranks) -> Tensor:
    """Return a gradient with equally many rows for each rank."""
    return pad_rows(grad, ranks.size * chunk_rows(grad.shape[0], ranks.size))


def averaged(
    own: Tensor, shard_shape: Sequence[int], *, dtype: torch.dtype, ranks: Ranks, outer: Sequence[Ranks]
) -> Tensor:
    """Return the average of a gradient from the sum over `ranks`."""
    own = sum_over(own, outer)
    if ranks.group:  # after the outer groups, so that all ranks reduce the same shape over them
        own = take_rows(own, shard_shape[0])
    averaged_over = math.prod(each.size for each in (ranks, *outer))
    if averaged_over == 1:  # of one rank: the gradient as it came, but a place of its own for each element
        return (own.clone() if _is_expanded(own) else own).to(dtype)
    return (own / averaged_over).to(dtype)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, so that it cannot be added to in place."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def sum_over(tensor: Tensor, groups: Sequence[Ranks]) -> Tensor:
    """Return the sum of `tensor` over each group in turn; `tensor` itself if all have one rank."""
    for ranks in groups:
        if ranks.size > 1:
            tensor = c10d_functional.wait_tensor(c10d_functional.all_reduce(tensor.contiguous(), "sum", ranks.group))
    return tensor
