"""Block-sparse attention on a GPU: torch's FlexAttention with the layout's blocks.

FlexAttention knows which blocks to skip by its `BlockMask`; Inductor makes the Triton kernels, forward and backward. It
has no dropout, and its blocks have to be 16 or larger: `why_not` says so, and such attentions are computed in blocks as
on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .block_attention import BlockAttention
from .layouts import SKIPPED, WHOLE
from .reading import codes_of, read_layout

_SMALLEST_BLOCK = 16


def why_not(q: Tensor, attention: BlockAttention) -> str | None:
    """Why FlexAttention does not compute it, or None."""
    block = read_layout(attention.text).block
    if q.device.type != "cuda":
        return f"on {q.device.type} it has no backward"
    if attention.dropout_p > 0:
        return "it has no dropout"
    if attention.bias is not None:
        return "the gradient of its bias is added up in blocks"
    if block < _SMALLEST_BLOCK or block & (block - 1):
        return f"its blocks are powers of two of {_SMALLEST_BLOCK} and more, not {block}"
    return None


def flex(q: Tensor, k: Tensor, v: Tensor, attention: BlockAttention, *, compiled: bool = True) -> Tensor:
    """The result, which autograd can differentiate.

    Args:
        q: `[b, heads, length, d]`.
        k: `[b, heads of keys, length, d]`.
        v: As k.
        attention: All else; neither bias nor dropout.
        compiled: Whether Triton kernels are made; otherwise plain torch computes all scores, which tests compare.
    """
    mask = block_mask(attention, q)
    run: Any = _compiled() if compiled else flex_attention
    made: Tensor = run(q, k, v, block_mask=mask, scale=attention.scale, enable_gqa=q.shape[1] != k.shape[1])
    return made


def block_mask(attention: BlockAttention, q: Tensor) -> BlockMask:
    """The layout, with the mask, as FlexAttention takes it."""
    found = codes_of(attention.text, q.shape[1], q.shape[2], causal=attention.causal)
    codes, device, block = found.codes.to(q.device), q.device, found.block
    own = torch.ones(2, block, block, dtype=torch.bool, device=device)
    own[SKIPPED] = False
    patterns, mask = torch.cat([own, found.patterns.to(device)]), attention.mask
    differs = len(codes) > 1

    def counts(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        code = codes[h if differs else 0, row // block, column // block]
        kept = patterns[code.long(), row % block, column % block]
        if mask is None:
            return kept
        at = [index if size > 1 else 0 for index, size in zip((b, h, row, column), mask.shape, strict=True)]
        return kept & mask[tuple(at)]

    whole = (codes == WHOLE) if mask is None else torch.zeros_like(codes, dtype=torch.bool)
    partial = (codes != SKIPPED) & ~whole
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(whole), BLOCK_SIZE=block, mask_mod=counts, seq_lengths=(q.shape[2], q.shape[2])
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each block of queries sees, `[1, heads, n]`, and which, those first, `[1, heads, n, n]`."""
    counts = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None], order[None]


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention)
