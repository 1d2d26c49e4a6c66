"""Functions on dsgraph's ops, for code that calls them directly instead of letting a pass insert them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsgraph.inductor_ext.sparse.block_sparse_attention import supports
from dsgraph.inductor_ext.sparse.layouts import Layout, SparseLayoutError

__all__ = ["block_sparse_attention"]


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Compute attention for only the blocks of a layout, forward and backward.

    Args:
        q: Queries `[batch, heads, length, width]` in float32, bfloat16, float16 or float64.
        k: Keys `[batch, heads of keys, length, width]`; the heads divide those of `q`.
        v: Values `[batch, heads of keys, length, width of values]`.
        layout: The computed blocks, see `dsgraph.sparse`.
        scale: The factor of the scores; 1 / sqrt(width) unless given.
        mask: bool, True where a key is visible: `[batch, length]` for padding, or broadcast over `[batch, heads,
            length, length]`. None: all are visible.
        bias: Added to the scores, broadcast over `[batch, heads, length, length]`; it may need a gradient.
        dropout: The share of probabilities that is dropped; the backward drops the same.
        causal: True if queries see no later keys, whatever the layout says.

    Returns:
        `[batch, heads, length, width of values]` in the dtype of `q`; 0 for a query without visible keys.

    Raises:
        SparseLayoutError: An argument is not supported, or does not fit the layout.
    """
    if not isinstance(layout, Layout):
        raise SparseLayoutError(f"block_sparse_attention: layout is {layout!r}; it takes one of dsgraph.sparse")
    if not 0 <= dropout <= 1:
        raise SparseLayoutError(f"block_sparse_attention: dropout is {dropout}; a share from 0 to 1 is expected")
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :]
    mask, bias = (None if item is None else item[(None,) * (4 - item.ndim)] for item in (mask, bias))
    reason = supports(q, k, v, mask, bias)
    if reason is not None:
        raise SparseLayoutError(f"block_sparse_attention: {reason}")
    y, *_ = torch.ops.dsgraph.block_sparse_attention(
        *(q, k, v, mask, bias, layout.text),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        dropout_p=float(dropout),
        causal=causal,
    )
    return y
