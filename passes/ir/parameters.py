"""What is known of the parameters of a partitioned model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ParamInfo:
    """What is known of a parameter that enters the graph.

    Attributes:
        name: Its name in the module that was called, or else in the model that was partitioned.
        shape: Full shape.
        shard_shape: Shape of this rank's rows. It belongs into torch's cache keys: torch itself (2.13) tells DTensors
            apart by their full shapes alone, and a warm start would hand one rank the graph of another.
        dtype: Master dtype.
        placement: "shard" (rows split over `group`) or "whole".
        requires_grad: False for a frozen parameter.
        tier: "disk" where the rows lie there, "" in memory.
        state_tier: "host" or "disk", where some of the optimizer's state of it lies that is not on the device; or "".
        state_share: How much of the state that is, from 0 to 1.
    """

    name: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    requires_grad: bool
    tier: str = ""
    state_tier: str = ""
    state_share: float = 0.0
