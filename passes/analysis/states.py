"""Bytes of the parameters and optimizer states of a step, and the tier that stores them.

Memory limits, the report, plans of an offload and its chunks read the formulas here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dsgraph.passes.ir.parameters import ParameterSpec

OPTIMIZER_STATES = 2
"""Tensors of a parameter's shape that an optimizer keeps for each trained parameter: Adam's two."""
MASTER_BYTES = 4
"""Bytes of an element of the float32 master of a parameter of 16 bits."""


def shard_bytes(info: ParameterSpec) -> int:
    """Return the bytes of this rank's rows of a parameter."""
    return math.prod(info.shard_shape) * info.dtype.itemsize


def held_bytes(info: ParameterSpec) -> int:
    """Return the bytes of these rows on the device; 0 if they are stored on another tier."""
    return 0 if info.tier else shard_bytes(info)


def state_bytes(info: ParameterSpec, tensors: int = OPTIMIZER_STATES) -> int:
    """Return the bytes on the device of the optimizer's state of a parameter.

    Args:
        info: The parameter.
        tensors: Number of tensors of its shape that the optimizer keeps.
    """
    return tensors * shard_bytes(info) * info.requires_grad - state_bytes_below(info, tensors)


def state_bytes_below(info: ParameterSpec, tensors: int = OPTIMIZER_STATES) -> int:
    """Return the bytes of that state on its `state_tier`."""
    return round(tensors * shard_bytes(info) * info.requires_grad * info.state_share)


def master_state_bytes(elements: int, tensors: int = OPTIMIZER_STATES) -> int:
    """Return the bytes of the float32 master of a parameter of 16 bits, and of its state, which is float32 too."""
    return (tensors + 1) * elements * MASTER_BYTES


def below_bytes(params: Iterable[ParameterSpec], tensors: int = OPTIMIZER_STATES) -> dict[str, dict[str, int]]:
    """Return the bytes on other tiers, by tier and part of a step. Gradients are stored next to their parameter."""
    found: dict[str, dict[str, int]] = {}

    def add(tier: str, part: str, size: int) -> None:
        if size:
            parts = found.setdefault(tier, {})
            parts[part] = parts.get(part, 0) + size

    for info in params:
        if info.tier:
            add(info.tier, "parameters", shard_bytes(info))
            add(info.tier, "gradients", shard_bytes(info))
        add(info.state_tier, "optimizer state", state_bytes_below(info, tensors))
    return found
