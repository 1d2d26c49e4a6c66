"""Lookups and losses over a tensor-parallel vocabulary.

They are functions of torch's own ops and those of `tensor_slices.py`: autograd derives the gradients that each rank
needs. As in Shoeybi et al.: Megatron-LM, arXiv 1909.08053, section 3, no rank sees the logits of the full vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import c10d_functional

from .tensor_slices import own_slice, sum_slices


def sliced_embedding(ids: Tensor, own: Tensor, padding_idx: int | None, ranks: int, group: str) -> Tensor:
    """Look up rows of a table of which each rank holds some.

    Args:
        ids: int64, any shape.
        own: `[rows / ranks, width]`: this rank's rows.
        padding_idx: A row that gets no gradient.
        ranks: Number of ranks of the group.
        group: Name of the process group.

    Returns:
        `[*ids.shape, width]`, the same on all ranks.
    """
    at, is_own = _places(ids, own.shape[0], ranks, group)
    rows = torch.nn.functional.embedding(at, own)
    if padding_idx is not None:
        rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return sum_slices(rows.masked_fill(~is_own.unsqueeze(-1), 0), group)


def sliced_cross_entropy(
    own: Tensor, target: Tensor, ignore_index: int, reduction: Literal["mean", "sum", "none"], ranks: int, group: str
) -> Tensor:
    """Return the cross entropy of logits of which each rank holds some columns.

    16-bit logits are converted to float32 first. The result has the dtype of `own`; under autocast it is float32, as in
    torch.

    Args:
        own: `[rows, classes / ranks]`: this rank's columns.
        target: int64 `[rows]`: classes, or `ignore_index`.
        ignore_index: Rows with this target are ignored.
        reduction: As for `torch.nn.functional.cross_entropy`.
        ranks: Number of ranks of the group.
        group: Name of the process group.

    Returns:
        A scalar, or `[rows]` without a reduction, the same on all ranks.
    """
    wide = torch.promote_types(own.dtype, torch.float32)
    kind = own.device.type
    # torch.is_autocast_enabled("meta") raises an error: the device meta has no autocast.
    dtype = wide if kind != "meta" and torch.is_autocast_enabled(kind) else own.dtype
    own = own.to(wide)
    largest = c10d_functional.all_reduce(own.detach().amax(-1), "max", group)
    shifted = own - c10d_functional.wait_tensor(largest).unsqueeze(-1)
    total = sum_slices(shifted.exp().sum(-1), group)
    counts = target != ignore_index
    at, is_own = _places(torch.where(counts, target, 0), own.shape[-1], ranks, group)
    picked = shifted.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    losses = total.log() - sum_slices(picked.masked_fill(~is_own, 0), group)
    losses = losses.masked_fill(~counts, 0)
    if reduction == "none":
        return losses.to(dtype)
    return (losses.sum() / counts.sum() if reduction == "mean" else losses.sum()).to(dtype)


def _places(ids: Tensor, count: int, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    """Return the positions of ids among this rank's `count` ids, 0 for others; and which are its own."""
    first = own_slice(torch.arange(0, ranks * count, count, device=ids.device), 0, 1, ranks, group)
    at = ids - first
    is_own = (at >= 0) & (at < count)
    return at.masked_fill(~is_own, 0), is_own
