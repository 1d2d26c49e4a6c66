"""The slice of a parameter on a tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from dsgraph.inductor_ext import slice_of


@dataclass(frozen=True)
class ParameterSlice:
    """The shard of a parameter along one dimension, over the ranks of a tensor-parallel axis.

    Attributes:
        dim: The sharded dimension; -1: none, the parameter is replicated.
        parts: Number of equal pieces that this dimension consists of; each of them is sharded.
        ranks: Number of ranks that share it.
        group: Name of their process group.
    """

    dim: int
    parts: int
    ranks: int
    group: str

    def own(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's slice of the full parameter, in memory of its own."""
        if self.dim < 0:
            return full.clone()
        return slice_of(full, self.dim, parts=self.parts, ranks=self.ranks, rank=rank)

    def full(self, own: Tensor) -> Tensor:
        """Return the full parameter: a marker in captured graphs, a gather elsewhere."""
        if self.dim < 0:
            return own
        return cast("Tensor", torch.ops.dsgraph.gather_slices(own, self.dim, self.parts, self.ranks, self.group))

    def own_shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a slice from that of the full parameter."""
        return tuple(size // self.ranks if dim == self.dim else size for dim, size in enumerate(full))

    def full_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the full parameter from that of a slice."""
        return tuple(size * self.ranks if dim == self.dim else size for dim, size in enumerate(own))
