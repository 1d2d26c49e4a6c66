"""The parameters and the other inputs of a captured graph, as passes see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
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


class InputRole(Enum):
    """The role of an input of a captured graph. The backend sets it; it is never guessed from shapes or names."""

    SHARD = "shard"
    """This rank's rows of a parameter: all of them if it is replicated."""
    GATHERED_COPY = "gathered copy"
    """All rows of a sharded parameter, gathered before the graph runs."""
    ACCUMULATED_GRADIENT = "accumulated gradient"
    """The sum of a parameter's gradients on this rank, not reduced yet."""
    BUFFER = "buffer"
    """A buffer of a module."""
    OPTIMIZER_STATE = "optimizer state"
    """A state of the optimizer for a parameter, such as the momentum to which a graph adds its gradient."""
    DATA = "data"
    """Anything else: the batch, results of an earlier graph, sizes."""


@dataclass(frozen=True)
class GraphInput:
    """One input of a captured graph.

    Attributes:
        role: Its role.
        parameter: The `ParameterSpec.name` of the parameter that it belongs to; empty if it belongs to none.
        slice_group: The group of a tensor-parallel parameter; empty for others.
        model_name: The name of `parameter` in the partitioned model. In a graph that equal blocks may share, `*` stands
            for the number of the block: "layers.*.up.weight". Dumps and reports show it. It is not part of cache keys,
            so no pass may decide by it.
    """

    role: InputRole
    parameter: str = ""
    slice_group: str = ""
    model_name: str = field(default="", compare=False, repr=False)


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
