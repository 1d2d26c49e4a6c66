"""A parameter of a partitioned model, as passes see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter on one rank: plain data, which a `ParameterState` refers to and a captured graph is told.

    Attributes:
        name: Its name in the module that was called, or else in the model that was partitioned.
        shape: Full shape.
        shard_shape: Shape of this rank's rows. It belongs into torch's cache keys: torch itself (2.13) tells DTensors
            apart by their full shapes alone, and a warm start would hand one rank the graph of another.
        dtype: Master dtype.
        group: Process group over which its rows are split; "" when every rank holds all of it.
        requires_grad: False for a frozen parameter.
        tier: "disk" where the rows are stored there, "" in memory.
        state_tier: "host" or "disk", where some of the optimizer's state of it is stored; "" for the device.
        state_share: How much of the state that is, from 0 to 1.
        outer_groups: Process groups over which its gradient is averaged besides.
        param_dtype: Dtype in which the forward sees it; None for the master dtype.
        reduce_dtype: Dtype in which its gradient is summed; None for the dtype in which the forward sees it.
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

    @property
    def placement(self) -> str:
        """The placement of its rows: "shard" (split over `group`) or "whole"."""
        return "shard" if self.group else "whole"

    def dtypes(self, master: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the full parameter and of the reduction, for shards in `master`."""
        compute = self.param_dtype or master
        return compute, self.reduce_dtype or compute
