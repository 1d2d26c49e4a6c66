"""The arguments of `partition`, as a partitioned model keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KEEP_WHOLE_BELOW = 2**14
"""Parameters with fewer elements stay replicated by default."""


@dataclass(frozen=True)
class OffloadArguments:
    """The argument `offload` of `partition`.

    Attributes:
        parameters: Where sharded parameters and their gradients are stored: "disk", or "" for the device.
        optimizer: Where the optimizer's state is stored: "host", "disk" or ""; see `dsgraph.offload_optimizer`.
        folder: The folder on the disk.
        parameters_ratio: The share of the parameters' bytes. The last ones stay, which the backward reads first.
        optimizer_ratio: The share of the state's bytes; that of the last parameters stays.
    """

    parameters: str = ""
    optimizer: str = ""
    folder: str = ""
    parameters_ratio: float = 1.0
    optimizer_ratio: float = 1.0


@dataclass(frozen=True)
class PartitionArguments:
    """The arguments of `partition`, which say how parameters are partitioned."""

    stage: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    keep_whole_below: int
    blocks: Literal["auto", "none"] | tuple[str, ...] = "none"
    offload: OffloadArguments = OffloadArguments()
    cast_forward_inputs: bool = True
