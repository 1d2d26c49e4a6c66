"""`dsgraph::reduce_compressed`: 1-bit reduction of gradients: a momentum of all ranks, sent as signs.

For n ranks, g_i the gradient of rank i, m the replicated momentum, e_i the rank's error, and f_r the error of rank r
for its chunk of the numbers (`torch.chunk`'s rule over the flattened parameter):

    x_i   = (beta * m + rate * g_i) + e_i                                   on every rank
    s_i   = compressed(x_i), one scale a chunk;   e_i' = x_i - s_i
    y_r   = 1/n * sum over i of chunk_r(s_i) + f_r                          on the owner of chunk r
    t_r   = compressed(y_r);                      f_r' = y_r - t_r
    m'    = concat(t_0, ..., t_{n-1})                                       on every rank

`compressed` is `pack_signs`, then `unpack_signs`; the first two lines are `compress_momentum`, the next two
`compress_average`. From Tang et al.: 1-bit Adam, arXiv 2102.02888, algorithm 1; there rate is 1 - beta, and here it is
divided by the loss scale. An element costs a bit to the owner, and a bit back.

The phases are plain functions that run eagerly and are traced into graphs: `CompressReductions` lowers the op, whose
eager kernel runs one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op
from dsgraph.inductor_ext.quant import signs_cpp
from dsgraph.inductor_ext.quant.signs import SCALE_BYTES, Blocks, pack_signs, packed_bytes, tables, unpack_signs

from .algorithms import EXCHANGES, GATHERS, Ranks, chunk_rows, pad_rows, take_rows, usual_exchange, usual_gather
from .reductions import one_group, reduction
from .tensor_slices import own_slice

COMPRESSED = "compressed momentum"
"""The name of this reduction; it keeps momentum, the two errors and the coefficients."""


@dataclass(frozen=True)
class Compressed:
    """A compressed tensor to send, and its error, which the next step compensates.

    Attributes:
        packed: `[chunks, bytes]` of uint8.
        error: In the shape of the compressed tensor.
    """

    packed: Tensor
    error: Tensor


def take_in_gradient(
    grad: Tensor, momentum: Tensor, worker_error: Tensor, coefficients: Tensor, ranks: int
) -> Compressed:
    """Return this rank's momentum, compressed for the owners of its chunks: `compress_momentum`."""
    return Compressed(*torch.ops.dsgraph.compress_momentum(grad, momentum, worker_error, coefficients, ranks))


def average_chunk(received: Tensor, owner_error: Tensor, n: int) -> Compressed:
    """Return the average of this rank's chunk over all ranks, compressed: `compress_average`."""
    return Compressed(*torch.ops.dsgraph.compress_average(received, owner_error, n))


def momentum_reference(
    grad: Tensor, momentum: Tensor, worker_error: Tensor, coefficients: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    """Compute `compress_momentum` in plain torch."""
    wide = grad.reshape(-1).to(momentum.dtype)
    x = momentum.reshape(-1) * coefficients[0] + wide * coefficients[1] + worker_error
    count, n = x.numel(), chunk_rows(x.numel(), ranks)
    packed = pack_signs(pad_rows(x, ranks * n).view(ranks, n), count)
    return packed, x - take_rows(unpack_signs(packed, n).view(-1), count)


def average_reference(received: Tensor, owner_error: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Compute `compress_average` in plain torch."""
    own, total = owner_error.shape[0], unpack_signs(received[:1], n)[0]
    for row in range(1, received.shape[0]):
        total = total + unpack_signs(received[row : row + 1], n)[0]
    y = take_rows(total / received.shape[0], own) + owner_error
    packed = pack_signs(pad_rows(y, n).view(1, n), own)
    return packed, y - take_rows(unpack_signs(packed, n).view(-1), own)


def _momentum_on_cpu(
    grad: Tensor, momentum: Tensor, worker_error: Tensor, coefficients: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    flat, given = momentum.reshape(-1), grad.reshape(-1)
    count, n = flat.numel(), chunk_rows(flat.numel(), ranks)
    packed = torch.zeros((ranks, packed_bytes(n)), dtype=torch.uint8)
    if signs_cpp.is_used(flat, given):
        return packed, signs_cpp.take_in(given, flat, worker_error, coefficients, packed, n=n)
    x, blocks, (keep, rate) = torch.empty(count), Blocks(n), coefficients.unbind()
    for start, end in blocks.parts(count):
        block = torch.mul(flat[start:end], keep, out=x[start:end])
        block.add_(torch.mul(given[start:end].to(x.dtype), rate, out=blocks.spare[: end - start]))
        block.add_(worker_error[start:end])
    for chunk, row in zip(x.split(n), packed, strict=False):
        blocks.pack(chunk, row, leaves_rest=True)
    return packed, x


def _average_on_cpu(received: Tensor, owner_error: Tensor, n: int) -> tuple[Tensor, Tensor]:
    own, ranks = owner_error.shape[0], received.shape[0]
    packed = torch.zeros((1, packed_bytes(n)), dtype=torch.uint8)
    if signs_cpp.is_used(owner_error, received):
        return packed, signs_cpp.average(received, owner_error, packed)
    y, blocks, by_rank = torch.empty(own), Blocks(n), tables(received)
    for start, end in blocks.parts(own):
        total, more = torch.empty(0), blocks.spare[: end - start + -(end - start) % 8].view(-1, 8)
        for row, table in zip(received[:, SCALE_BYTES:], by_rank, strict=True):
            torch.index_select(table, 0, row[start // 8 : -(-end // 8)].int(), out=more)
            total = more.clone() if not total.numel() else total.add_(more)
        block = torch.div(total.view(-1)[: end - start], ranks, out=y[start:end])
        block.add_(owner_error[start:end])
    blocks.pack(y, packed[0], leaves_rest=True)
    return packed, y


def _fake_momentum(
    grad: Tensor, momentum: Tensor, worker_error: Tensor, coefficients: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    size = packed_bytes(chunk_rows(momentum.numel(), ranks))
    return momentum.new_empty((ranks, size), dtype=torch.uint8), torch.empty_like(worker_error)


def _fake_average(received: Tensor, owner_error: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return received.new_empty((1, packed_bytes(n))), torch.empty_like(owner_error)


@define_op(fake=_fake_momentum)
def compress_momentum(
    grad: Tensor, momentum: Tensor, worker_error: Tensor, coefficients: Tensor, ranks: int
) -> tuple[Tensor, Tensor]:
    """Compress this rank's momentum for the owners of its chunks.

    Args:
        grad: `[*shape]`, this rank's gradient.
        momentum: `[*shape]` of float32, replicated.
        worker_error: `[numel]` of float32, this rank's error.
        coefficients: `[2]` of float32: the factors of momentum and gradient.
        ranks: Number of chunks.

    Returns:
        `[ranks, 4 + bytes]`, see `pack_signs`, and the new error.
    """
    compute = _momentum_on_cpu if _is_on_cpu(grad) else momentum_reference
    return compute(grad, momentum, worker_error, coefficients, ranks)


@define_op(fake=_fake_average)
def compress_average(received: Tensor, owner_error: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Average this rank's chunk over all ranks, and compress it.

    Args:
        received: `[ranks, 4 + ceil(n / 8)]` of uint8.
        owner_error: `[numbers of this chunk]` of float32.
        n: Numbers of the largest chunk.

    Returns:
        `[1, 4 + ceil(n / 8)]`, and the new error.
    """
    return (_average_on_cpu if _is_on_cpu(received) else average_reference)(received, owner_error, n)


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > 0


def put_together(gathered: Tensor, shape: Sequence[int], n: int) -> Tensor:
    """Return the averaged momentum, `[*shape]`, from the chunks `[ranks, bytes]` of at most n elements."""
    count = torch.Size(shape).numel()
    return take_rows(unpack_signs(gathered, n).view(-1), count).view(list(shape))


def rows_of(full: Tensor, shard_shape: Sequence[int], ranks: Ranks) -> Tensor:
    """Return this rank's rows of a full tensor, in memory of their own."""
    padded = pad_rows(full, ranks.size * chunk_rows(full.shape[0], ranks.size))
    return take_rows(own_slice(padded, 0, 1, ranks.size, ranks.group), shard_shape[0])


def _fake(
    grad: Tensor, shard_shape: Sequence[int], momentum: Tensor, *errors: Tensor, splits_rows: bool, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    full = torch.empty_like(momentum) if splits_rows else momentum.new_empty(0)
    return momentum.new_empty(shard_shape), full, torch.empty_like(errors[0]), torch.empty_like(errors[1])


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
    """Return the averaged momentum of all ranks, and the errors of its compression.

    Args:
        grad: `[*shape]`, this rank's gradient of the full parameter.
        shard_shape: Shape of this rank's part of the parameter.
        momentum: See `take_in_gradient`.
        worker_error: See `take_in_gradient`.
        owner_error: See `average_chunk`.
        coefficients: See `take_in_gradient`.
        accumulated_grad: `[*shape]`, to which `grad` is added first; or None.
        group: Name of the process group; "" for this rank alone.
        splits_rows: True if each rank keeps only its rows of the parameter.

    Returns:
        This rank's part of the momentum, `[*shard_shape]`; the full momentum, `[*shape]`, if that is another tensor,
            else `[0]`; and the two errors for the next step.
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


@reduction(COMPRESSED)
def _compressed(
    grad: Tensor,
    shard_shape: Sequence[int],
    kept: Sequence[Tensor],
    accumulated_grad: Tensor | None,
    *,
    group: str,
    outer_groups: Sequence[str],
    **_: object,
) -> tuple[Tensor, Sequence[Tensor | None]]:
    group, splits_rows = one_group(group, outer_groups)
    own, full, *errors = torch.ops.dsgraph.reduce_compressed(
        grad, shard_shape, *kept, accumulated_grad, group=group, splits_rows=splits_rows
    )
    return own, [full if splits_rows else None, *errors, None]
