"""`dsgraph::reduce_compressed`: a momentum that takes in every rank's gradient, of which signs travel, not numbers.

For n ranks, g_i the gradient of rank i, m the momentum that all ranks hold, e_i the rank's error, and f_r the error of
rank r for its chunk of the numbers (`torch.chunk`'s rule over the flattened parameter):

    x_i   = (beta * m + rate * g_i) + e_i                                   on every rank
    s_i   = compressed(x_i), one scale a chunk;   e_i' = x_i - s_i
    y_r   = 1/n * sum over i of chunk_r(s_i) + f_r                          on the owner of chunk r
    t_r   = compressed(y_r);                      f_r' = y_r - t_r
    m'    = concat(t_0, ..., t_{n-1})                                       on every rank

`compressed` is `pack_signs`, then `unpack_signs`. From Tang et al.: 1-bit Adam, arXiv 2102.02888, algorithm 1; there
rate is 1 - beta, and the loss's scale divides it here. A number costs a bit on its way to the owner, and a bit back.

The phases are plain functions, run eagerly and traced into graphs alike: `CompressReductions` lowers the op, whose
eager kernel runs one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op
from dsgraph.inductor_ext.quant.signs import pack_signs, unpack_signs

from .algorithms import EXCHANGES, GATHERS, Ranks, chunk_rows, pad_rows, take_rows, usual_exchange, usual_gather
from .tensor_slices import own_slice


@dataclass(frozen=True)
class Compressed:
    """What a rank sends, and what it has to make up for the next time.

    Attributes:
        packed: `[chunks, bytes]` of uint8.
        error: Of the shape of what was compressed.
    """

    packed: Tensor
    error: Tensor


def take_in_gradient(
    grad: Tensor, momentum: Tensor, worker_error: Tensor, coefficients: Tensor, ranks: int
) -> Compressed:
    """This rank's momentum, compressed for the owners of its chunks.

    Args:
        grad: `[*shape]`, this rank's gradient.
        momentum: `[*shape]` of float32, which all ranks hold.
        worker_error: `[numel]` of float32, this rank's.
        coefficients: `[2]` of float32: what momentum and gradient are multiplied by.
        ranks: Among how many chunks the numbers are dealt out.
    """
    keep, rate = coefficients[0], coefficients[1]
    wide = grad.reshape(-1).to(momentum.dtype)
    x = momentum.reshape(-1) * keep + wide * rate + worker_error
    count, n = x.numel(), chunk_rows(x.numel(), ranks)
    packed = pack_signs(pad_rows(x, ranks * n).view(ranks, n), count)
    return Compressed(packed, x - take_rows(unpack_signs(packed, n).view(-1), count))


def average_chunk(received: Tensor, owner_error: Tensor, n: int) -> Compressed:
    """The average of what all ranks have sent of this rank's chunk, compressed.

    Args:
        received: `[ranks, bytes]`.
        owner_error: `[numbers of this chunk]` of float32.
        n: Numbers of the largest chunk.
    """
    own = owner_error.shape[0]
    y = take_rows(unpack_signs(received, n).sum(0) / received.shape[0], own) + owner_error
    packed = pack_signs(pad_rows(y, n).view(1, n), own)
    return Compressed(packed, y - take_rows(unpack_signs(packed, n).view(-1), own))


def put_together(gathered: Tensor, shape: Sequence[int], n: int) -> Tensor:
    """The averaged momentum, `[*shape]`, of the chunks `[ranks, bytes]` of all owners, each of at most n numbers."""
    count = torch.Size(shape).numel()
    return take_rows(unpack_signs(gathered, n).view(-1), count).view(list(shape))


def rows_of(full: Tensor, shard_shape: Sequence[int], ranks: Ranks) -> Tensor:
    """This rank's rows of a full tensor, in memory of their own."""
    padded = pad_rows(full, ranks.size * chunk_rows(full.shape[0], ranks.size))
    return take_rows(own_slice(padded, 0, 1, ranks.size, ranks.group), shard_shape[0])


def _fake(
    grad: Tensor,
    shard_shape: Sequence[int],
    momentum: Tensor,
    worker_error: Tensor,
    owner_error: Tensor,
    coefficients: Tensor,
    accumulated_grad: Tensor | None = None,
    *,
    group: str,
    splits_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = torch.empty_like
    full = empty(momentum) if splits_rows else momentum.new_empty(0)
    return momentum.new_empty(shard_shape), full, empty(worker_error), empty(owner_error)


@define_op(fake=_fake)
def reduce_compressed(
    grad: Tensor,
    shard_shape: Sequence[int],
    momentum: Tensor,
    worker_error: Tensor,
    owner_error: Tensor,
    coefficients: Tensor,
    accumulated_grad: Tensor | None = None,
    *,
    group: str,
    splits_rows: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The averaged momentum of all ranks, and the errors of its compression.

    Args:
        grad: `[*shape]`, this rank's gradient of the full parameter.
        shard_shape: Shape of this rank's part of the parameter.
        momentum: See `take_in_gradient`.
        worker_error: See `take_in_gradient`.
        owner_error: See `average_chunk`.
        coefficients: See `take_in_gradient`.
        accumulated_grad: `[*shape]`, to which `grad` is added first; or None.
        group: Name of the process group; "" for this rank alone.
        splits_rows: Whether each rank keeps its rows of the parameter, and not all of it.

    Returns:
        This rank's part of the momentum, `[*shard_shape]`; the whole of it, `[*shape]`, where that is another tensor,
        else `[0]`; and the two errors for the next time.
    """
    if accumulated_grad is not None:
        grad = accumulated_grad + grad.to(accumulated_grad.dtype)
    ranks = Ranks.of(group)
    n = chunk_rows(momentum.numel(), ranks.size)
    sent = take_in_gradient(grad, momentum, worker_error, coefficients, ranks.size)
    received = sent.packed
    if ranks.size > 1:
        received = EXCHANGES[usual_exchange(ranks, grad.device)](sent.packed, ranks).finish()
    average = average_chunk(received, owner_error, n)
    gathered = average.packed
    if ranks.size > 1:
        gathered = GATHERS[usual_gather(ranks, grad.device)](average.packed, ranks).finish()
    full = put_together(gathered, momentum.shape, n)
    if not splits_rows:
        return full, momentum.new_empty(0), sent.error, average.error
    return rows_of(full, shard_shape, ranks), full, sent.error, average.error
