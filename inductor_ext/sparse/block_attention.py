"""Block-sparse attention in blocks, forward and backward: work and memory only for the computed blocks.

A few heads at a time are copied, so that their blocks are contiguous. Buckets of `row_buckets.py` gather the blocks of
keys that their queries see, and are computed chunk by chunk. The backward recomputes probabilities, and draws the same
random numbers for dropout as the forward: both process the chunks in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import Tensor

from .products import ScoreTerms, fused_backward, fused_forward, written_backward, written_forward
from .reading import read_layout
from .row_buckets import Bucket, buckets_of

# Bytes of keys and values that are gathered at once, and of copies of heads: a few times a core's cache.
_GATHERED = 4 << 20
_COPIED = 16 << 20
_MOST_SCORES = 1 << 20


@dataclass(frozen=True)
class BlockAttention:
    """One attention: the arguments that all chunks share.

    Attributes:
        text: Text of the layout.
        mask: bool `[b or 1, heads or 1, length or 1, length]`, True for visible keys; None: all are.
        bias: Added to scores, broadcast like the mask.
        scale: The factor of scores.
        dropout_p: The dropped share of probabilities.
        causal: True if queries see no later keys, whatever the layout says.
        seed: Seed of the dropout's random numbers.
        bias_needs_grad: True if the backward returns a gradient of `bias`.
    """

    text: str
    mask: Tensor | None
    bias: Tensor | None
    scale: float
    dropout_p: float
    causal: bool
    seed: int = 0
    bias_needs_grad: bool = False

    def is_written(self, q: Tensor, v: Tensor) -> bool:
        """Return whether products are written out, because torch's fused kernel lacks a feature."""
        is_fused = q.device.type == "cpu" and q.shape[-1] == v.shape[-1]
        return not is_fused or self.dropout_p > 0 or self.bias_needs_grad

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of the dropout, which draws chunk by chunk."""
        return torch.Generator(device).manual_seed(self.seed)


@dataclass(frozen=True)
class _Heads:
    """A few heads of queries of one batch entry, with the heads of keys that they share.

    Attributes:
        entry: Index in the batch.
        queries: The heads of queries.
        keys: The heads of keys.
        buckets: Their buckets.
    """

    entry: int
    queries: slice
    keys: slice
    buckets: tuple[Bucket, ...]

    @property
    def shared(self) -> int:
        """Number of heads of queries for each head of keys, among those here."""
        return (self.queries.stop - self.queries.start) // (self.keys.stop - self.keys.start)


@dataclass(frozen=True)
class _Chunk:
    """Units that are computed at once.

    Attributes:
        heads: Heads of queries, counted within `_Heads`, int64 `[g]`.
        rows: Blocks of queries `[g, r]`, within a head.
        columns: Blocks of keys `[g, c]`, within a head.
        query_rows: Blocks of queries of all heads in order, `[g * r]`.
        key_rows: Blocks of keys of all heads in order, `[g * c]`.
        allowed: As in the bucket.
    """

    heads: Tensor
    rows: Tensor
    columns: Tensor
    query_rows: Tensor
    key_rows: Tensor
    allowed: Tensor | None


def forward(q: Tensor, k: Tensor, v: Tensor, attention: BlockAttention) -> tuple[Tensor, Tensor]:
    """Return the result `[b, heads, length, e]`, and logarithms of sums of exponentials `[b, heads, padded length]`.

    Args:
        q: `[b, heads, length, d]`.
        k: `[b, heads of keys, length, d]`.
        v: `[b, heads of keys, length, e]`.
        attention: The other arguments.
    """
    block, length = read_layout(attention.text).block, q.shape[2]
    count = -(-length // block)
    out = q.new_empty(q.shape[0], length, q.shape[1], v.shape[-1]).transpose(1, 2)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sums = q.new_zeros(q.shape[0], q.shape[1], count * block, dtype=wide)
    written, generator = attention.is_written(q, v), attention.generator(q.device)
    compute: Callable[..., tuple[Tensor, Tensor]] = written_forward if written else fused_forward
    for some in _heads(q, k, attention, written=written):
        q_rows, k_rows, v_rows = _block_rows(q, k, v, some, block)
        y = q.new_zeros(len(q_rows), block, v.shape[-1])
        y_sums = sums.new_zeros(len(q_rows), block)
        for chunk in _chunks(some, count, k_rows, v_rows):
            terms = _terms(attention, some, chunk, block, length, generator)
            my_k, my_v = (_units(rows, chunk.key_rows, chunk) for rows in (k_rows, v_rows))
            made, made_sums = compute(_units(q_rows, chunk.query_rows, chunk), my_k, my_v, terms)
            y[chunk.query_rows] = made.reshape(-1, block, v.shape[-1])
            y_sums[chunk.query_rows] = made_sums.reshape(-1, block)
        out[some.entry, some.queries] = y.view(-1, count * block, v.shape[-1])[:, :length]
        sums[some.entry, some.queries] = y_sums.view(-1, count * block)
    return out, sums


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, attention: BlockAttention
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v, contiguous, and of the bias if needed.

    Args:
        grad: Gradient of the result.
        q: As in the forward.
        k: As in the forward.
        v: As in the forward.
        out: The result.
        sums: The sums of the forward.
        attention: The other arguments.
    """
    block, length = read_layout(attention.text).block, q.shape[2]
    count = -(-length // block)
    dq, dk, dv = (item.new_empty(item.shape) for item in (q, k, v))
    needs_bias = attention.bias is not None and attention.bias_needs_grad
    dbias = torch.zeros_like(attention.bias, dtype=sums.dtype) if needs_bias else None  # type: ignore[arg-type]
    written, generator = attention.is_written(q, v), attention.generator(q.device)
    totals: list[Tensor] = []
    for some in _heads(q, k, attention, written=written):
        q_rows, k_rows, v_rows = _block_rows(q, k, v, some, block)
        grad_rows, out_rows = (_rows_of(item[some.entry, some.queries], block) for item in (grad, out))
        sum_rows = sums[some.entry, some.queries].reshape(-1, block)
        dq_rows = torch.zeros_like(q_rows)
        if some.queries.start * k.shape[1] % q.shape[1] == 0:  # the first of those that share keys
            totals = [torch.zeros_like(item, dtype=sums.dtype) for item in (k_rows, v_rows)]
        for chunk in _chunks(some, count, k_rows, v_rows):
            terms = _terms(attention, some, chunk, block, length, generator)
            mine, my_q, my_out = (_units(rows, chunk.query_rows, chunk) for rows in (grad_rows, q_rows, out_rows))
            my_k, my_v = (_units(rows, chunk.key_rows, chunk) for rows in (k_rows, v_rows))
            my_sums = sum_rows[chunk.query_rows].view(len(chunk.heads), -1)
            if written:
                *found, dscores = written_backward(mine, my_q, my_k, my_v, my_out, my_sums, terms)
                if dbias is not None:
                    _add_to_bias(dbias, dscores, some, chunk, block, length)
            else:
                found = list(fused_backward(mine, my_q, my_k, my_v, my_out, my_sums, terms))
            dq_rows[chunk.query_rows] = found[0].reshape(-1, *q_rows.shape[1:]).to(q.dtype)
            for total, more in zip(totals, found[1:], strict=True):
                total.index_add_(0, chunk.key_rows, more.reshape(-1, *total.shape[1:]).to(total.dtype))
        dq[some.entry, some.queries] = dq_rows.view(-1, count * block, q.shape[-1])[:, :length]
        for whole, total in zip((dk, dv), totals, strict=True):
            whole[some.entry, some.keys] = total.view(-1, count * block, whole.shape[-1])[:, :length].to(whole.dtype)
    return dq, dk, dv, None if dbias is None or attention.bias is None else dbias.to(attention.bias.dtype)


def _heads(q: Tensor, k: Tensor, attention: BlockAttention, *, written: bool) -> Iterator[_Heads]:
    """Yield all heads in order, as many at a time as may be copied: one if they differ."""
    batch, heads, length = q.shape[:3]
    each = heads // k.shape[1]
    most = _MOST_SCORES if written else None
    plans = buckets_of(attention.text, heads, length, causal=attention.causal, most_scores=most)
    if len(plans) > 1:
        for entry in range(batch):
            for head in range(heads):
                at = head // each
                yield _Heads(entry, slice(head, head + 1), slice(at, at + 1), plans[head])
        return
    step = max(1, _COPIED // (length * q.shape[-1] * q.itemsize * (2 * each + 2)))
    for entry in range(batch):
        for at in range(0, k.shape[1], step):
            end = min(at + step, k.shape[1])
            yield _Heads(entry, slice(at * each, end * each), slice(at, end), plans[0])


def _rows_of(heads: Tensor, block: int) -> Tensor:
    """Return heads `[p, length, d]` as consecutive blocks, `[p * n, block, d]`."""
    over = -heads.shape[1] % block
    padded = F.pad(heads, (0, 0, 0, over)) if over else heads
    return padded.reshape(-1, block, heads.shape[-1])


def _block_rows(q: Tensor, k: Tensor, v: Tensor, some: _Heads, block: int) -> tuple[Tensor, Tensor, Tensor]:
    mine = _rows_of(q[some.entry, some.queries], block)
    return mine, _rows_of(k[some.entry, some.keys], block), _rows_of(v[some.entry, some.keys], block)


def _chunks(some: _Heads, count: int, k_rows: Tensor, v_rows: Tensor) -> Iterator[_Chunk]:
    heads = some.queries.stop - some.queries.start
    width = (k_rows[0].numel() + v_rows[0].numel()) * k_rows.itemsize
    for bucket in some.buckets:
        units, scores = len(bucket.rows), bucket.rows.shape[1] * bucket.columns.shape[1] * k_rows.shape[1] ** 2
        step = max(1, min(_GATHERED // (bucket.columns.shape[1] * width), 4 * _MOST_SCORES // scores))
        for start in range(0, heads * units, step):
            place = torch.arange(start, min(start + step, heads * units))
            head, unit = place // units, place % units
            rows, columns = bucket.rows[unit], bucket.columns[unit]
            yield _Chunk(
                head,
                rows,
                columns,
                (head[:, None] * count + rows).flatten().to(k_rows.device),
                ((head // some.shared)[:, None] * count + columns).flatten().to(k_rows.device),
                None if bucket.allowed is None else bucket.allowed.to(k_rows.device),
            )


def _units(rows: Tensor, at: Tensor, chunk: _Chunk) -> Tensor:
    """Return the blocks of units, `[g, blocks * block, d]`."""
    return rows.index_select(0, at).view(len(chunk.heads), -1, rows.shape[-1])


def _terms(
    attention: BlockAttention, some: _Heads, chunk: _Chunk, block: int, length: int, generator: torch.Generator
) -> ScoreTerms:
    terms = ScoreTerms(attention.scale, chunk.allowed, dropout_p=attention.dropout_p)
    if attention.mask is not None:
        mask = _picked(attention.mask, some, chunk, block, length)
        terms = replace(terms, allowed=mask if terms.allowed is None else mask & terms.allowed)
    if attention.bias is not None:
        terms = replace(terms, bias=_picked(attention.bias, some, chunk, block, length))
    if attention.dropout_p > 0:
        shape = (len(chunk.heads), chunk.rows.shape[1] * block, chunk.columns.shape[1] * block)
        draws = torch.rand(shape, generator=generator, device=generator.device)
        terms = replace(terms, kept=draws >= attention.dropout_p)
    return terms


def _places(of: Tensor, some: _Heads, chunk: _Chunk, block: int, length: int) -> tuple[Tensor, ...]:
    """Return the index of a chunk's scores in a tensor that is broadcast over `[b, heads, length, length]`.

    Tokens after the last one are replaced by the last: their scores are ignored.
    """
    within = torch.arange(block)
    rows = (chunk.rows[:, :, None] * block + within).flatten(1).clamp_(max=length - 1)
    columns = (chunk.columns[:, :, None] * block + within).flatten(1).clamp_(max=length - 1)
    heads = (chunk.heads + some.queries.start)[:, None, None]
    places = (torch.full_like(heads, some.entry), heads, rows[:, :, None], columns[:, None, :])
    first = torch.zeros(1, 1, 1, dtype=torch.int64)
    index = [first if size == 1 else at for at, size in zip(places, of.shape, strict=True)]
    return tuple(at.to(of.device) for at in index)


def _picked(of: Tensor, some: _Heads, chunk: _Chunk, block: int, length: int) -> Tensor:
    """Return the part of a mask or bias for a chunk, broadcast over `[g, m, s]`."""
    return of[_places(of, some, chunk, block, length)]


def _add_to_bias(dbias: Tensor, dscores: Tensor, some: _Heads, chunk: _Chunk, block: int, length: int) -> None:
    index = _places(dbias, some, chunk, block, length)
    shape = torch.broadcast_shapes(*(at.shape for at in index))
    dbias.index_put_(index, dscores.sum_to_size(shape), accumulate=True)
