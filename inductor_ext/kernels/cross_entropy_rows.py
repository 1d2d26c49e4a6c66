"""The loss of each row of logits, with the gradient written over the logits: the inner part of a fused head.

For logits x `[rows, V]`, targets y, weights g of the rows, scale s, soft cap c, label smoothing e and z-loss k:

    z      = s * x                            with a soft cap: c * tanh(s * x / c)
    lse    = log(sum_j exp(z_j))
    loss   = lse - (1 - e) * z_y - e/V * sum_j z_j + k * lse^2
    dx_j   = g * s * ((1 + 2 k lse) * exp(z_j - lse) - e/V - (1 - e) * [j == y])   soft cap: * (1 - (z_j / c)^2)

Loss and gradient of a row with `y == ignore_index` are 0. Everything is computed in 32 bits (64 for 64-bit logits).

On an accelerator one Triton program computes a row: it reads it once for maximum and sum (Milakov, Gimelshein: Online
normalizer calculation for softmax, arXiv:1805.02867) and once for the gradient. On a CPU torch's ops go over a few rows
at a time, as many as stay in the cache from one op to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .launch import next_power_of_2, on_device_of, on_gpu, tl, triton, wide_dtype

# Elements that torch's ops take at a time on a CPU: 1 MiB in 32 bits, what a core's own cache holds.
CACHED_ELEMENTS = 2**18
# Most elements of a row that a program holds at a time. 8192 in 32 bits over 16 warps: 16 registers a thread.
MAX_BLOCK = 8192
WARPS = 16


class LossTerms(NamedTuple):
    """The terms of a row's loss; see the formula above for their meaning."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


def cross_entropy_rows(logits: Tensor, target: Tensor, row_weights: Tensor | None, terms: LossTerms) -> Tensor:
    """Return the loss of each row. Overwrites `logits`: with the gradient of `row_weights @ losses` if they are given.

    Args:
        logits: `[rows, V]`, rows contiguous; undefined afterwards if `row_weights` is None.
        target: `[rows]`, from 0 to V - 1, or `ignore_index`.
        row_weights: `[rows]`, in the wide dtype; None if no gradient is needed.
        terms: The terms of the loss.

    Returns:
        `[rows]` in the wide dtype.
    """
    if on_gpu(logits) and logits.dtype is not torch.float64:
        return launch(logits, target, row_weights, terms)
    step = len(logits) if logits.device.type != "cpu" else max(1, CACHED_ELEMENTS // logits.shape[1])
    losses = logits.new_empty(len(logits), dtype=wide_dtype(logits.dtype))
    for start in range(0, len(logits), max(step, 1)):
        rows = slice(start, start + step)
        weights = None if row_weights is None else row_weights[rows, None]
        losses[rows] = _few_rows(logits[rows], target[rows, None], weights, terms)
    return losses


def _few_rows(logits: Tensor, target: Tensor, row_weights: Tensor | None, terms: LossTerms) -> Tensor:
    """Compute `cross_entropy_rows` for targets and weights `[rows, 1]`, with torch's ops and in place."""
    x = logits.to(wide_dtype(logits.dtype))
    if terms.logit_scale != 1:
        x.mul_(terms.logit_scale)
    if terms.softcap is not None:
        x.div_(terms.softcap).tanh_()
        slope = 1 - x * x if row_weights is not None else x
        x.mul_(terms.softcap)
    ignored = target == terms.ignore_index
    target = target.masked_fill(ignored, 0)
    share, smoothing = 1 - terms.label_smoothing, terms.label_smoothing
    loss = -share * x.gather(1, target)
    if smoothing:
        loss -= smoothing * x.mean(1, keepdim=True)
    top = x.amax(1, keepdim=True)
    total = x.sub_(top).exp_().sum(1, keepdim=True)
    lse = total.log() + top
    loss += lse + terms.z_loss * lse * lse
    if row_weights is not None:
        weights = (row_weights * terms.logit_scale).masked_fill_(ignored, 0)
        x.mul_((1 + 2 * terms.z_loss * lse) / total * weights)
        if smoothing:
            x.sub_(smoothing / x.shape[1] * weights)
        x.scatter_add_(1, target, -share * weights)
        if terms.softcap is not None:
            x.mul_(slope)
        if x is not logits:
            logits.copy_(x)
    return loss.masked_fill_(ignored, 0).squeeze(1)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _load(at, inside, softcap, logit_scale, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load logits, scaled and capped."""
    z = tl.load(at, mask=inside, other=0.0).to(tl.float32) * logit_scale
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def cross_entropy_rows_kernel(  # type: ignore[no-untyped-def]
    logits, target, row_weights, losses, vocabulary, stride, ignore_index,
    label_smoothing, z_loss, softcap, logit_scale,
    HAS_SOFTCAP: tl.constexpr, WRITES_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row in each program: its loss, and its gradient in place of its logits."""
    row = tl.program_id(0).to(tl.int64)  # rows * vocabulary exceeds 32 bits
    logits += row * stride
    columns = tl.arange(0, BLOCK)
    label = tl.load(target + row)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if WRITES_GRADIENT:
            for start in range(0, vocabulary, BLOCK):
                tl.store(logits + start + columns, 0.0, mask=start + columns < vocabulary)
        return

    # The caller has asserted that labels are in range; out of it this must not read outside the row.
    chosen = _load(logits + label, (label >= 0) & (label < vocabulary), softcap, logit_scale, HAS_SOFTCAP)
    top = float("-inf")
    total = 0.0  # of exp(z - top)
    sum_z = 0.0
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        z = _load(logits + start + columns, inside, softcap, logit_scale, HAS_SOFTCAP)
        sum_z += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, float("-inf"))
        new_top = tl.maximum(top, tl.max(z, 0))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)  # classes ruled out: -inf less -inf is no number
        total = total * tl.exp(top - pivot) + tl.sum(tl.exp(z - pivot), 0)
        top = new_top
    lse = top + tl.log(total)
    loss = lse - (1 - label_smoothing) * chosen + z_loss * lse * lse
    if label_smoothing > 0:  # 0 * sum_z is no number where a class is ruled out
        loss -= label_smoothing / vocabulary * sum_z
    tl.store(losses + row, loss)

    if WRITES_GRADIENT:
        weight = tl.load(row_weights + row) * logit_scale
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            z = tl.load(logits + start + columns, mask=inside, other=0.0).to(tl.float32) * logit_scale
            if HAS_SOFTCAP:
                t = _tanh(z / softcap)
                z = softcap * t
            d = (1 + 2 * z_loss * lse) * tl.exp(z - lse) - label_smoothing / vocabulary
            d -= tl.where(start + columns == label, 1 - label_smoothing, 0.0)
            if HAS_SOFTCAP:
                d *= 1 - t * t
            tl.store(logits + start + columns, (d * weight).to(logits.dtype.element_ty), mask=inside)


def launch(logits: Tensor, target: Tensor, row_weights: Tensor | None, terms: LossTerms) -> Tensor:
    """Compute `cross_entropy_rows` by the kernel; without `row_weights` it leaves `logits` unchanged."""
    rows, vocabulary = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    if rows == 0:
        return losses
    with on_device_of(logits):
        cross_entropy_rows_kernel[(rows,)](
            logits,
            target.contiguous(),
            losses if row_weights is None else row_weights.contiguous(),
            losses,
            vocabulary,
            logits.stride(0),
            terms.ignore_index,
            terms.label_smoothing,
            terms.z_loss,
            terms.softcap or 1.0,
            terms.logit_scale,
            HAS_SOFTCAP=terms.softcap is not None,
            WRITES_GRADIENT=row_weights is not None,
            BLOCK=min(next_power_of_2(vocabulary), MAX_BLOCK),
            num_warps=WARPS,
        )
    return losses
