"""Comparisons of sizes that may be symbolic. They add no guard."""

from __future__ import annotations

import torch
from torch import Tensor

from .compat import statically_true


def same_size(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Return whether two sizes are known to be equal, whatever the batch. It adds no guard."""
    return statically_true(one == other)


def same_shape(one: Tensor, other: Tensor) -> bool:
    """Return whether two shapes are known to be equal, whatever the batch."""
    return one.ndim == other.ndim and all(map(same_size, one.shape, other.shape))
