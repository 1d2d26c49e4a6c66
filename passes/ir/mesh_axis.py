"""What passes know of an axis of the device mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class AxisRole(Enum):
    """What the ranks along an axis of the mesh share out among themselves."""

    REPLICATE = "replicate"
    """Batches. Each rank has the same rows of every parameter."""
    SHARD = "shard"
    """Batches, and the rows of every split parameter."""
    TENSOR = "tensor"
    """Slices of single operators."""
    PIPELINE = "pipeline"
    """Layers."""
    EXPERT = "expert"
    """Experts."""


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the device mesh.

    Attributes:
        name: Its name, for people.
        size: How many ranks it spans.
        group: Its process group.
        backend: That group's backend: "gloo", "nccl", ...
        role: What it is for.
    """

    name: str
    size: int
    group: str
    backend: str
    role: AxisRole = AxisRole.SHARD


def shard_axis(axes: Iterable[MeshAxis]) -> MeshAxis | None:
    """The axis over which rows are split; None where no axis is for that."""
    return next((axis for axis in axes if axis.role is AxisRole.SHARD), None)
