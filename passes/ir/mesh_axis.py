"""An axis of the device mesh, as passes see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class AxisRole(Enum):
    """The distribution of work among the ranks along an axis of the mesh."""

    REPLICATE = "replicate"
    """Data parallel with replicated parameters: each rank has the same rows of every parameter."""
    SHARD = "shard"
    """Data parallel, with the rows of parameters sharded."""
    TENSOR = "tensor"
    """Tensor parallel: slices of single operators."""
    PIPELINE = "pipeline"
    """Pipeline parallel: layers."""
    EXPERT = "expert"
    """Expert parallel: experts."""


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the device mesh.

    Attributes:
        name: Its human-readable name.
        size: Number of ranks that it spans.
        group: Its process group.
        backend: That group's backend: "gloo", "nccl", ...
        role: Its role.
    """

    name: str
    size: int
    group: str
    backend: str
    role: AxisRole = AxisRole.SHARD


def shard_axis(axes: Iterable[MeshAxis]) -> MeshAxis | None:
    """Return the axis over which rows are sharded; None if there is none."""
    return next((axis for axis in axes if axis.role is AxisRole.SHARD), None)
