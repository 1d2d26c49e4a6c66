"""`dsgraph::gather_by_messages`: an all-gather for gloo, by direct messages between ranks.

    full = concat(shard_0, ..., shard_{n-1})            shape: `[n * rows, ...]`

Like torch's functional collectives it starts the transfer and returns; `wait_tensor` ends it. It has three advantages:

- gloo's own `_c10d_functional.all_gather_into_tensor` corrupts the heap when two of them are in flight at once (seen on
  torch 2.13.0: "malloc(): unaligned tcache chunk detected" within a thousand pairs on 2 ranks), so that nothing could
  be gathered before its use. Messages are safe.
- Messages use both directions of a link at once, see `messages`. Over a link of 1 Gbit/s, in parts of 4 MB: 110 to 118
  MB/s each way, while broadcasts reach 66 to 71. Over the loopback device both are similar.
- Rows are received in place. gloo's own gather flattens and copies.

Messages need host memory. gloo's own gather of CUDA tensors ends the process with a segmentation fault (seen on torch
2.11.0); the form that writes to a given tensor does not, and replaces messages there. It is waited for immediately: on
a GPU gloo is only for trials with ranks that share one.

The number of bytes sent is the least possible: each rank sends `n - 1` shards' worth.

`dsgraph::gather_by_messages_coalesced` gathers several tensors at once, each into memory of its own, and each with a
wait of its own: the latency of one gather, and nothing is copied into one buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import c10d_functional, lower_as_collective, resolve_group

from .messages import Messages, start_messages


def start_gather(shard: Tensor, full: Tensor, group_name: str) -> None:
    """Start to fill `full` `[n * rows, ...]` with the `[rows, ...]` of each rank of a group.

    `wait_tensor(full)` ends it.

    `shard` may be this rank's rows of `full`.
    """
    _start_gathers([(shard, full)], group_name)


def _start_gathers(pairs: Iterable[tuple[Tensor, Tensor]], group_name: str) -> None:
    group = resolve_group(group_name)
    tensors = []
    for shard, full in pairs:
        if shard.numel() == 0:
            continue
        if full.device.type != "cpu":
            c10d_functional.all_gather_into_tensor_out(shard, group.size(), group_name, out=full)
            c10d_functional.wait_tensor(full)
            continue
        rows_of = full.chunk(group.size())
        own = rows_of[group.rank()]
        if shard.data_ptr() != own.data_ptr():
            own.copy_(shard)
        tensors.append(Messages(full, receive=rows_of, send=[own] * group.size()))
    start_messages(tensors, group)


def _empty_full(shard: Tensor, group_size: int) -> Tensor:
    return shard.new_empty((group_size * shard.shape[0], *shard.shape[1:]))


@torch.library.custom_op(
    "dsgraph::gather_by_messages",
    mutates_args=(),
    schema="(Tensor shard, int group_size, str group_name) -> Tensor",
)
def gather_by_messages(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    """Return the rows of all ranks of a group, in rank order.

    Args:
        shard: `[rows, ...]`, of the same shape on every rank. It is read before the op returns.
        group_size: Number of ranks in the group.
        group_name: Name of the process group.

    Returns:
        `[group_size * rows, ...]`, to be read after `wait_tensor`.
    """
    full = _empty_full(shard, group_size)
    start_gather(shard, full, group_name)
    return full


@gather_by_messages.register_fake
def _(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    return _empty_full(shard, group_size)


@torch.library.custom_op(
    "dsgraph::gather_by_messages_coalesced",
    mutates_args=(),
    schema="(Tensor[] shards, int group_size, str group_name) -> Tensor[]",
)
def gather_by_messages_coalesced(shards: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """Return, for each of several tensors, the rows of all ranks of a group, in rank order.

    Args:
        shards: Each `[rows, ...]`, of the same shape on every rank, in the same order. Read before the op returns.
        group_size: Number of ranks in the group.
        group_name: Name of the process group.

    Returns:
        For each a `[group_size * rows, ...]`, to be read after its own `wait_tensor`.
    """
    fulls = [_empty_full(shard, group_size) for shard in shards]
    _start_gathers(zip(shards, fulls, strict=True), group_name)
    return fulls


@gather_by_messages_coalesced.register_fake
def _(shards: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    return [_empty_full(shard, group_size) for shard in shards]


def register_lowering() -> None:
    """Register the ops with Inductor as collectives."""
    lower_as_collective(torch.ops.dsgraph.gather_by_messages.default)
    lower_as_collective(torch.ops.dsgraph.gather_by_messages_coalesced.default)
