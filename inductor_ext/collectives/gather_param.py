"""`dsgraph::gather_param` and its derivative `dsgraph::reduce_grad`: the seam between a plain model and its shards.

For n ranks in all groups and p of them in `group`, with shard_r the r-th of p chunks of rows (`torch.chunk`'s rule):

    gather_param:  full   = concat(shard_0, ..., shard_{p-1}).to(dtype)            shape: `shape`
    reduce_grad:   grad_r = 1/n * sum over n ranks of rows_r(local_sum + grad), in reduce_dtype  shape: `shard_shape`

`group=""` means that every rank holds the whole parameter: nothing is gathered and the gradient is all-reduced over
`outer_groups`. With a `group`, `outer_groups` are the replicas' groups of hybrid sharding. `replica` is a full copy
that was gathered earlier; when it is given, it is the result and `shard` only receives the gradient. `local_sum` is
what this rank has added up of the gradient before, where there is any; see `dsgraph/step/accumulation.py`.

Run eagerly both ops are real collectives, so a model that holds them is correct without any compiler. In a captured
graph they are markers: `InsertZeroCollectives` lowers them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import c10d_functional, resolve_group

from .messages import sends_messages


def chunk_rows(rows: int, world: int) -> int:
    """Rows of the largest of `world` chunks, which is what every rank sends: shorter chunks are padded to it."""
    return -(-rows // world)


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` with zero rows appended until it has `rows`; `tensor` itself (made contiguous) when it has them."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def all_gather_rows(shard: Tensor, rows: int, group: str) -> Tensor:
    """The `rows` rows of which each rank of `group` holds a chunk, in rank order."""
    world = resolve_group(group).size()
    padded = pad_rows(shard, chunk_rows(rows, world))
    full = c10d_functional.wait_tensor(c10d_functional.all_gather_into_tensor(padded, world, group))
    return full[:rows]


def start_reduce_scatter(grad: Tensor, shard_rows: int, group: str) -> Callable[[], Tensor]:
    """Starts to sum `grad` over `group`; the result waits for this rank's `shard_rows` rows of it.

    On gloo by messages and a sum in the order of ranks: its own reduce-scatter is an all-reduce of everything.
    """
    process_group = resolve_group(group)
    world = process_group.size()
    padded = pad_rows(grad, chunk_rows(grad.shape[0], world) * world)
    if not sends_messages(process_group, padded.device):
        own = c10d_functional.reduce_scatter_tensor(padded, "sum", world, group)
        return lambda: c10d_functional.wait_tensor(own)[:shard_rows]
    received = torch.ops.dsgraph.exchange_by_messages(padded, world, group)

    def finish() -> Tensor:
        by_rank = c10d_functional.wait_tensor(received).unflatten(0, (world, -1))
        return by_rank.sum(0, dtype=padded.dtype)[:shard_rows]

    return finish


def all_reduce_sum(tensor: Tensor, groups: Sequence[str]) -> Tensor:
    """The sum of `tensor` over each of `groups` in turn."""
    for group in groups:
        tensor = c10d_functional.wait_tensor(c10d_functional.all_reduce(tensor.contiguous(), "sum", group))
    return tensor


def group_count(group: str, outer_groups: Sequence[str]) -> int:
    """How many ranks a gradient is averaged over: the product of the sizes of its groups."""
    return math.prod(resolve_group(name).size() for name in (group, *outer_groups) if name)


@torch.library.custom_op(
    "dsgraph::gather_param",
    mutates_args=(),
    schema="(Tensor shard, Tensor? replica, SymInt[] shape, Tensor? local_sum=None, *, ScalarType dtype, "
    "ScalarType reduce_dtype, str group, str[] outer_groups, bool adds_sum=False) -> Tensor",
)
def gather_param(
    shard: Tensor,
    replica: Tensor | None,
    shape: Sequence[int],
    local_sum: Tensor | None = None,
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    outer_groups: Sequence[str],
    adds_sum: bool = False,
) -> Tensor:
    """The full parameter of which `shard` is this rank's part.

    Args:
        shard: `[rows_r, ...]`, this rank's rows in the master dtype; all rows when `group` is empty.
        replica: `[*shape]` in `dtype`, a copy gathered earlier, or None.
        shape: Shape of the full parameter.
        local_sum: `[*shape]` in any dtype, a sum of gradients of this rank that were not reduced, or None.
        dtype: Dtype of the result. The cast comes before the gather, so that fewer bytes travel.
        reduce_dtype: Dtype in which the gradient is summed.
        group: Name of the process group over which rows are split; "" for a parameter that every rank holds whole.
        outer_groups: Names of the groups over which the gradient is averaged besides.
        adds_sum: Whether the gradient is reduced together with `local_sum`. Who sets it sees to it that the sum is
            added once.

    Returns:
        `[*shape]` in `dtype`, a new tensor.
    """
    if replica is not None:
        return replica.clone()
    if not group:
        return shard.to(dtype, copy=True)
    return all_gather_rows(shard.to(dtype), shape[0], group)


@gather_param.register_fake
def _(
    shard: Tensor,
    replica: Tensor | None,
    shape: Sequence[int],
    local_sum: Tensor | None = None,
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    outer_groups: Sequence[str],
    adds_sum: bool = False,
) -> Tensor:
    return shard.new_empty(shape, dtype=dtype)


def start_reduction(
    grad: Tensor,
    shard_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    outer_groups: Sequence[str],
) -> Callable[[], Tensor]:
    """Starts what `reduce_grad` does, as far as `group`; the result waits for it and does the rest."""
    summed = grad.to(reduce_dtype)
    over_group = start_reduce_scatter(summed, shard_shape[0], group) if group else lambda: summed

    def finish() -> Tensor:
        return (all_reduce_sum(over_group(), outer_groups) / group_count(group, outer_groups)).to(dtype)

    return finish


@torch.library.custom_op(
    "dsgraph::reduce_grad",
    mutates_args=(),
    schema="(Tensor grad, SymInt[] shard_shape, Tensor? local_sum=None, *, ScalarType dtype, "
    "ScalarType reduce_dtype, str group, str[] outer_groups) -> Tensor",
)
def reduce_grad(
    grad: Tensor,
    shard_shape: Sequence[int],
    local_sum: Tensor | None = None,
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    outer_groups: Sequence[str],
) -> Tensor:
    """This rank's part of the gradient, averaged over all ranks.

    Args:
        grad: `[*shape]`, this rank's gradient of the full parameter.
        shard_shape: Shape of the result: that of this rank's shard.
        local_sum: `[*shape]`, to which `grad` is added first, in the dtype of the sum; or None.
        dtype: Dtype of the result: the master dtype of the shard.
        reduce_dtype: Dtype in which ranks are summed.
        group: Name of the group whose ranks each keep their rows; "" keeps all rows on every rank.
        outer_groups: Names of the groups over which the result is summed besides.

    Returns:
        `[*shard_shape]` in `dtype`, a new tensor.
    """
    if local_sum is not None:
        grad = local_sum + grad.to(local_sum.dtype)
    return start_reduction(
        grad, shard_shape, dtype=dtype, reduce_dtype=reduce_dtype, group=group, outer_groups=outer_groups
    )()


@reduce_grad.register_fake
def _(
    grad: Tensor,
    shard_shape: Sequence[int],
    local_sum: Tensor | None = None,
    *,
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: str,
    outer_groups: Sequence[str],
) -> Tensor:
    return grad.new_empty(shard_shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    shard, _, _, local_sum = inputs
    ctx.shard_shape = shard.shape
    ctx.dtype = shard.dtype
    ctx.reduce = {name: keyword_only_inputs[name] for name in ("reduce_dtype", "group", "outer_groups")}
    ctx.save_for_backward(local_sum if keyword_only_inputs["adds_sum"] else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (local_sum,) = ctx.saved_tensors
    shard_grad = torch.ops.dsgraph.reduce_grad(grad, ctx.shard_shape, local_sum, dtype=ctx.dtype, **ctx.reduce)
    return shard_grad, None, None, None


gather_param.register_autograd(_backward, setup_context=_setup_context)
