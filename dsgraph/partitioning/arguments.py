"""The arguments of `partition`: their checks, and how a partitioned model keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from dsgraph.utils.errors import PartitionError

from .refusals import SENT_DTYPES
from .stages import STAGES

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


def check_arguments(stage: object, param_dtype: object, reduce_dtype: object, keep_whole_below: object) -> None:
    """Check values of these arguments of `partition`; None is the default of each.

    Raises:
        PartitionError: Names the argument.
    """
    if stage is not None and (not isinstance(stage, int) or isinstance(stage, bool) or stage not in STAGES):
        raise PartitionError(f"stage is {stage!r}; ZeRO stages are 0, 1, 2 and 3")
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype in SENT_DTYPES
        ):
            raise PartitionError(
                f"{name} is {dtype!r}; it takes a floating-point dtype of 16 bits or more, such as torch.bfloat16, "
                "or None"
            )
    if keep_whole_below is None:
        return
    if not isinstance(keep_whole_below, int) or isinstance(keep_whole_below, bool) or keep_whole_below < 0:
        raise PartitionError(f"keep_whole_below is {keep_whole_below!r}; it takes a number of elements, 0 or more")


def check_cast(cast_forward_inputs: object, param_dtype: object) -> None:
    """Check the argument `cast_forward_inputs` of `partition`.

    Raises:
        PartitionError: It is wrong, or has no effect.
    """
    if cast_forward_inputs is None:
        return
    if not isinstance(cast_forward_inputs, bool):
        raise PartitionError(f"cast_forward_inputs is {cast_forward_inputs!r}; it takes True, False or None")
    if param_dtype is None:
        raise PartitionError("cast_forward_inputs has no effect without param_dtype: remove it, or set both")
