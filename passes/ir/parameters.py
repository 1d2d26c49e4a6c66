"""A parameter of a partitioned model, as passes see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .parameter_slice import ParameterSlice


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter on one rank: plain data, for a `ParameterState` and for captured graphs.

    Attributes:
        name: Its name in the module that was called, or else in the model that was partitioned.
        shape: The shape that is gathered: the full shape, or that of this rank's slice of a tensor-parallel parameter.
        shard_shape: Shape of this rank's rows. It is part of torch's cache keys: torch itself (2.13) distinguishes
            DTensors only by their full shapes, so that a warm start would give one rank the graph of another.
        dtype: Master dtype.
        group: Process group over which its rows are sharded; "" if it is replicated.
        requires_grad: False for a frozen parameter.
        tier: "disk" where the rows are stored there, "" in memory.
        state_tier: "host" or "disk" if a part of its optimizer state is stored there; "" for the device.
        state_share: That share of the state, from 0 to 1.
        outer_groups: Further process groups over which its gradient is averaged.
        param_dtype: Dtype in which the forward sees it; None for the master dtype.
        reduce_dtype: Dtype in which its gradient is summed; None for the dtype in which the forward sees it.
        held: This rank's slice, whose rows are sharded; None for a parameter that is not tensor-parallel.
    """

    name: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dtype: torch.dtype
    group: str
    requires_grad: bool
    tier: str = ""
    state_tier: str = ""
    state_share: float = 0.0
    outer_groups: tuple[str, ...] = ()
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    held: ParameterSlice | None = None

    @property
    def placement(self) -> str:
        """The placement of its rows: "shard" (sharded over `group`) or "whole" (replicated)."""
        return "shard" if self.group else "whole"

    @property
    def numel(self) -> int:
        """The number of elements that are gathered, and of its gradient before the reduction."""
        return math.prod(self.shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full parameter."""
        return self.shape if self.held is None else self.held.full_shape(self.shape)

    def dtypes(self, master: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the full parameter and of the reduction, for shards in `master`."""
        compute = self.param_dtype or master
        return compute, self.reduce_dtype or compute
