"""Lengths to which prompts are padded, and masks over all positions of a cache."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Mask: TypeAlias = Tensor | dict[str, Tensor]
"""A mask (rows, 1, queries, positions), True for keys that are visible; a dict by layer type if there are several."""

_LEAST_BUCKET = 32


def buckets(max_tokens: int) -> tuple[int, ...]:
    """Return the bucket lengths: powers of two up to `max_tokens`, which is the last."""
    found = []
    size = _LEAST_BUCKET
    while size < max_tokens:
        found.append(size)
        size *= 2
    return (*found, max_tokens)


def mask_of_all(mask: Mask | None, ids: Tensor, *, filled: int, positions: int) -> Mask:
    """Return the mask that transformers made, or a causal mask if it made none.

    Args:
        mask: The mask that `generate` passes to a forward.
        ids: The query tokens (rows, length).
        filled: Tokens per row that are already in the cache.
        positions: Number of positions of the cache.
    """
    if isinstance(mask, dict):
        masks = {kind: mask_of_all(each, ids, filled=filled, positions=positions) for kind, each in mask.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))  # type: ignore[return-value]
    if mask is not None:
        return mask
    rows, length = ids.shape
    seen = torch.arange(filled, filled + length, device=ids.device)
    causal = torch.arange(positions, device=ids.device) <= seen[:, None]
    return causal.expand(rows, 1, -1, -1)


def with_queries_behind(mask: Mask, count: int) -> Mask:
    """Return a mask whose last queries are repeated `count` times, for the padding of a prompt."""
    if isinstance(mask, dict):
        return {kind: with_queries_behind(each, count) for kind, each in mask.items()}  # type: ignore[misc]
    return torch.cat([mask, mask[:, :, -1:].expand(-1, -1, count, -1)], 2)
