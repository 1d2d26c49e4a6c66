"""Attention (Vaswani et al., 2017) that models write out, by torch's own `scaled_dot_product_attention`.

For q `[..., l, d]`, keys `[..., d, s]` (transposed already, as in the product) and v `[..., s, e]`:

    scores = scale * (q @ keys) + bias                 [..., l, s]
    scores = scores where mask, and fill elsewhere
    y      = dropout(softmax(scores)) @ v              [..., l, e]

torch computes it without storing scores or probabilities, if it has a kernel for the device and the dtype. Its softmax
is in float32 (float64 for float64), whatever the inputs are. `bias` and `mask` are broadcast over the scores; with
`causal`, query i sees the keys 0 to i. The derivative is that of torch's function.

There is no Triton kernel here: the op lets a graph express in one call what needs several calls of the function.
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
    q: Tensor, keys: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *, dtype: torch.dtype, **options: Any
) -> Tensor:
    """Compute the op in plain torch, with all scores and probabilities; `options` are the rest of `attention`."""
    scores = (q.to(dtype) @ keys.to(dtype)).to(wide_dtype(dtype)) * options["scale"]
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask if options["keeps"] else mask, options["fill"])
    if options["causal"]:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    p = options["dropout_p"]
    y = F.dropout(scores.softmax(-1).to(dtype), p, training=p > 0) @ v.to(dtype)
    return y.contiguous() if options["contiguous"] else y


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
    """Compute attention of queries over keys and values.

    A finite `fill` is added to the scores instead of replacing them: the same if it is so large that scores are
    negligible. Rows in which a mask of -inf hides all keys are 0, while plain torch returns NaN.

    Args:
        q: `[..., l, d]`, of 2 to 4 dimensions.
        keys: `[..., d, s]`, with the leading dimensions of `q`.
        v: `[..., s, e]`, with the leading dimensions of `q`.
        bias: Added to the scores, in `dtype`; broadcast over `[..., l, s]`. None: no bias.
        mask: bool, broadcast over `[..., l, s]`: the visible scores. None: all of them.
        keeps: True if the mask is True for visible scores, as in `where`; False if for the others, as in `masked_fill`.
        fill: The score of the others.
        scale: The factor of the scores.
        dropout_p: The share of probabilities that are dropped.
        causal: True if query i sees only the keys 0 to i. Then there is neither bias nor mask.
        dtype: Dtype to which q, keys and v are cast, and of the result.
        contiguous: True if the result must be contiguous; otherwise it has the layout of torch's kernel.

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
    """Return x as batch, heads, rows, columns, as torch's kernels require."""
    return x[None, None] if x.ndim == 2 else x.unsqueeze(1) if x.ndim == 3 else x


define_composite(attention)


def supports(
    q: Tensor, keys: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, **options: Any
) -> str | None:
    """Return why the op does not support these arguments, or None."""
    if not q.ndim == keys.ndim == v.ndim or not 2 <= q.ndim <= 4:
        return f"its queries, keys and values have {q.ndim}, {keys.ndim} and {v.ndim} dimensions, not the same 2 to 4"
    if not options["dtype"].is_floating_point:
        return f"it is in {options['dtype']}"
    if options["causal"] and (bias is not None or mask is not None):
        return "it has a bias or a mask besides the causal one"
    return None
