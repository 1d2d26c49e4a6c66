"""Attention (Vaswani et al., 2017) by torch's own `scaled_dot_product_attention`, from what models write out.

For q `[..., l, d]`, keys `[..., d, s]` (transposed already, as they stand in the product) and v `[..., s, e]`:

    scores = scale * (q @ keys) + bias                 [..., l, s]
    scores = scores where mask, and fill elsewhere
    y      = dropout(softmax(scores)) @ v              [..., l, e]

torch computes it without storing scores or probabilities, where it has a kernel for the device and the dtype. Its
softmax is in float32 (float64 for float64), whatever the inputs are. `bias` and `mask` are broadcast over the scores;
`causal` is the mask that leaves query i the keys 0 to i. The derivative is that of torch's function.

Nothing is written in Triton here: the op is there so that a graph can say in one call what takes the function a few.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import Tensor

from dsgraph.inductor_ext.ops import define_composite

from .launch import wide_dtype


def reference(
    q: Tensor,
    keys: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    keeps: bool,
    fill: float,
    scale: float,
    dropout_p: float,
    causal: bool,
    dtype: torch.dtype,
    contiguous: bool,
) -> Tensor:
    """What the op computes, in plain torch, with all scores and probabilities."""
    scores = (q.to(dtype) @ keys.to(dtype)).to(wide_dtype(dtype)) * scale
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask if keeps else mask, fill)
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    y = F.dropout(scores.softmax(-1).to(dtype), dropout_p, training=dropout_p > 0) @ v.to(dtype)
    return y.contiguous() if contiguous else y


def attention(
    q: Tensor,
    keys: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    keeps: bool,
    fill: float,
    scale: float,
    dropout_p: float,
    causal: bool,
    dtype: torch.dtype,
    contiguous: bool,
) -> Tensor:
    """Attention of queries over keys and values.

    With a finite `fill` it is added to the scores in place of setting them: the same where it is so large that no score
    counts beside it. Rows that a mask of -inf leaves nothing of are 0, where plain torch gives nan.

    Args:
        q: `[..., l, d]`, of 2 to 4 dimensions.
        keys: `[..., d, s]`, the leading dimensions as those of `q`.
        v: `[..., s, e]`, likewise.
        bias: Added to the scores, in `dtype`; broadcast over `[..., l, s]`. None: nothing is.
        mask: bool, broadcast over `[..., l, s]`: which scores count. None: all of them.
        keeps: Whether the mask is True for those that count, as in `where`, or for the others, as in `masked_fill`.
        fill: The score of the others.
        scale: The factor of the scores.
        dropout_p: The share of probabilities that are dropped.
        causal: Whether query i sees the keys 0 to i alone. Then there is neither bias nor mask.
        dtype: To which q, keys and v are cast; of the result.
        contiguous: Whether the result must be; else its layout is what torch's kernel makes.

    Returns:
        `[..., l, e]` in `dtype`.
    """
    lifted, k, values = (_with_four_dimensions(item.to(dtype)) for item in (q, keys.transpose(-2, -1), v))
    added = bias
    if mask is not None:
        kept = mask if keeps else ~mask
        added = kept if fill == -math.inf else torch.zeros_like(mask, dtype=dtype).masked_fill(~kept, fill)
    if added is not None:
        added = added[(None,) * (2 - added.ndim)] if added.ndim < 2 else added
        added = added.unsqueeze(1) if q.ndim == 3 and added.ndim == 3 else added
    y = F.scaled_dot_product_attention(
        lifted, k, values, attn_mask=added, dropout_p=dropout_p, is_causal=causal, scale=scale
    )
    y = y.reshape((*q.shape[:-1], v.shape[-1])) if q.ndim < 4 else y
    return y.contiguous() if contiguous else y


def _with_four_dimensions(x: Tensor) -> Tensor:
    """As batch, heads, rows, columns, which is what torch's kernels take."""
    return x[None, None] if x.ndim == 2 else x.unsqueeze(1) if x.ndim == 3 else x


define_composite(attention)


def supports(
    q: Tensor, keys: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, **options: Any
) -> str | None:
    """Why the op cannot take these, or None."""
    if not q.ndim == keys.ndim == v.ndim or not 2 <= q.ndim <= 4:
        return f"its queries, keys and values have {q.ndim}, {keys.ndim} and {v.ndim} dimensions, not the same 2 to 4"
    if not options["dtype"].is_floating_point:
        return f"it is in {options['dtype']}"
    if options["causal"] and (bias is not None or mask is not None):
        return "it has a bias or a mask besides the causal one"
    return None
