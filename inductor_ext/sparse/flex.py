"""Block-sparse attention on a GPU: torch's FlexAttention with the layout's blocks.

FlexAttention skips blocks by its `BlockMask`; Inductor generates the Triton kernels, forward and backward. Their tiles
have to divide the mask's blocks, and Inductor chooses those of the backward by GPU, dtype and width: with blocks
smaller than 128 it finds none, whatever tiles are requested. So the mask has blocks of `MASK_BLOCK`, whatever the
layout's are: one without visible scores is skipped, in others the layout decides score by score.

Attention that FlexAttention does not support (`why_not`) is computed in blocks, as on a CPU.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dsgraph.inductor_ext.compat import allow_recompiles

from .block_attention import BlockAttention
from .layouts import SKIPPED, WHOLE, BlockCodes
from .reading import codes_of

MASK_BLOCK = 128
_WIDTHS = (16, 256)  # of heads: the least that `tl.dot` takes, the most that fits in shared memory
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RECOMPILES = 64  # one for each layout's block, dtype, width and number of heads; Dynamo's own limit is 8


def why_not(q: Tensor, v: Tensor, attention: BlockAttention) -> str | None:
    """Return why FlexAttention does not support it, or None."""
    least, most = _WIDTHS
    if q.device.type != "cuda":
        return f"on {q.device.type} it has no backward"
    if attention.dropout_p > 0:
        return "it has no dropout"
    if attention.bias is not None:
        return "the gradient of its bias is added up in blocks"
    if q.dtype not in _DTYPES:
        return f"it has no kernel for {q.dtype}"
    if not all(least <= item.shape[-1] <= most for item in (q, v)):
        return f"its heads are {least} to {most} wide, not {q.shape[-1]} and {v.shape[-1]}"
    return None


def flex(q: Tensor, k: Tensor, v: Tensor, attention: BlockAttention, *, compiled: bool = True) -> Tensor:
    """Return the result, which autograd can differentiate.

    Args:
        q: `[b, heads, length, d]`.
        k: `[b, heads of keys, length, d]`.
        v: `[b, heads of keys, length, d]`.
        attention: The other arguments; neither bias nor dropout.
        compiled: True generates Triton kernels; otherwise plain torch computes all scores, which tests compare.
    """
    run: Any = _compiled() if compiled else flex_attention
    with allow_recompiles(_RECOMPILES):
        made: Tensor = run(
            *(q, k, v),
            block_mask=block_mask(attention, q),
            scale=attention.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=kernel_options(q, v),
        )
    return made


def block_mask(attention: BlockAttention, q: Tensor) -> BlockMask:
    """Return the layout, with the mask, as a `BlockMask` of FlexAttention."""
    mask = attention.mask
    made = _layout_mask(attention.text, *q.shape[1:3], attention.causal, q.device, has_mask=mask is not None)
    if mask is None:
        return made
    in_layout = made.mask_mod

    def counts(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        at = [index if size > 1 else 0 for index, size in zip((b, h, row, column), mask.shape, strict=True)]
        return in_layout(b, h, row, column) & mask[tuple(at)]

    made = copy(made)
    made.mask_mod = counts
    return made


@lru_cache(maxsize=32)
def _layout_mask(
    text: str, heads: int, length: int, causal: bool, device: torch.device, *, has_mask: bool
) -> BlockMask:
    """Return the mask of the layout, cached: to make it, the host waits for the device.

    With a mask no block is full.
    """
    with torch.inference_mode(False):
        found = codes_of(text, heads, length, causal=causal)
        codes, block = found.codes.int().to(device), found.block
        own = torch.ones(2, block, block, dtype=torch.bool)
        own[SKIPPED] = False
        patterns = torch.cat([own, found.patterns]).int().to(device)  # Triton cannot prefetch single bytes
        differs = len(codes) > 1

        def counts(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            i, j = (torch.div(at, block, rounding_mode="trunc") for at in (row, column))  # cheaper than //: no signs
            return patterns[codes[h if differs else 0, i, j], row - i * block, column - j * block] != 0

        some, whole = (item.to(device) for item in _merged(found, length))
        if has_mask:
            whole = torch.zeros_like(whole)
        return BlockMask.from_kv_blocks(
            *_listed(some & ~whole),
            *_listed(whole),
            BLOCK_SIZE=MASK_BLOCK,
            mask_mod=counts,
            seq_lengths=(length, length),
        )


def _merged(found: BlockCodes, length: int) -> tuple[Tensor, Tensor]:
    """Return the mask's blocks with some visible score, and those with all: bool `[heads or 1, n, n]`."""
    starts = torch.arange(0, length, MASK_BLOCK)[:, None]
    blocks = torch.arange(found.codes.shape[-1])[None] * found.block
    overlaps = ((blocks < starts + MASK_BLOCK) & (blocks + found.block > starts)).float()

    def is_in(where: Tensor) -> Tensor:
        return overlaps @ where.float() @ overlaps.T > 0

    return is_in(found.codes != SKIPPED), ~is_in(found.codes != WHOLE)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each block of queries sees, `[1, heads, n]`, and which first, `[1, heads, n, n]`."""
    counts = chosen.sum(-1, dtype=torch.int32)
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None], order[None]


def kernel_options(q: Tensor, v: Tensor) -> dict[str, Any]:
    """Return tiles and stages that fit in shared memory together with the layout's data, for any width.

    Inductor's own fill it with q, k and v. Its kernel for few queries is switched off: it refuses some numbers of
    heads.
    """
    width = 1 << (max(q.shape[-1], v.shape[-1]) - 1).bit_length()  # as the kernel rounds it
    row = width * q.itemsize  # bytes
    rows, columns = (64, 64) if row <= 256 else (64, 32) if row <= 512 else (32, 16)
    options = {"fwd_BLOCK_M": rows, "fwd_BLOCK_N": columns, "FORCE_USE_FLEX_ATTENTION": True}
    return options if row <= 256 else options | {"bwd_num_stages": 1}


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention, fullgraph=True)
