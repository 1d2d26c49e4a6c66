"""Placement of the rows of a parameter on a mesh, and broadcasts that give all ranks the same values."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard

from dsgraph.compat import dtensor
from dsgraph.compat.dtensor import strided_shard
from dsgraph.inductor_ext import chunk_rows, resolve_group
from dsgraph.passes import AxisRole, ParameterSpec
from dsgraph.ranks.mesh import axis_roles, shard_dim

from .tensor_slices import slice_placement

BLOCK = 256
"""Number of elements for which an optimizer's state of 8 bits has one scale."""


def placements_for(spec: ParameterSpec, mesh: DeviceMesh, *, is_tensor_parallel: bool) -> list[Placement]:
    """Return the placement of a parameter: rows sharded over the sharding dimension, or replicated.

    Args:
        spec: The parameter.
        mesh: The ranks that hold the same slices.
        is_tensor_parallel: True adds the placement along the ranks of a tensor-parallel model.
    """
    held = spec.held
    # Rows are those of the slice, although its dimension of the mesh is the last.
    rows = strided_shard(0, held.ranks) if held is not None and held.dim == 0 else Shard(0)
    data: list[Placement] = [
        rows if spec.group and role is AxisRole.SHARD else Replicate() for role in axis_roles(mesh)
    ]
    return [*data, slice_placement(held)] if is_tensor_parallel else data


def broadcast_from_first(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Overwrite `tensor` on every rank of the mesh with that of the first."""
    for dim in range(mesh.ndim):  # to the first rank of every row of the mesh, then along the rows
        group = mesh.get_group(dim)
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group)


def local_rows(full: Tensor, spec: ParameterSpec, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a full parameter, or of this rank's slice of it, in memory of their own."""
    return rows_in(full, spec, mesh).clone()


def rows_in(full: Tensor, spec: ParameterSpec, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a full parameter, in its memory unless the parameter is tensor-parallel."""
    if spec.held is not None and tuple(full.shape) != spec.shape:
        full = spec.held.own(full, resolve_group(spec.held.group).rank())
    if not spec.group:
        return full
    return full[_own_rows(len(full), mesh, shard_dim(mesh))]


def rows_like(param: Tensor, full: Tensor) -> Tensor:
    """Return this rank's rows of a full tensor, split as those of `param`; in memory of their own if it is split.

    Args:
        param: The parameter.
        full: The full tensor, or this rank's slice of it.
    """
    is_slice = full.shape != param.shape  # then the last dimension of the mesh has the slices
    dims = split_dims(param)[: -1 if is_slice else None]
    if not dims:
        return full
    return full[_own_rows(len(full), param.device_mesh, dims[0])].clone()  # type: ignore[attr-defined]


def split_dims(tensor: Tensor) -> list[int]:
    """Return the dimensions of the mesh over which a tensor is split, by rows or by slices; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return []
    # `is_shard` is False for the slices of fused parameters.
    return [dim for dim, one in enumerate(tensor.placements) if not (one.is_replicate() or one.is_partial())]


def gather_rows(value: DTensor, spec: ParameterSpec, mesh: DeviceMesh) -> Tensor:
    """Return all rows of a tensor that is split like a parameter; of a tensor-parallel one, those of this rank's slice.

    The ranks of `mesh`, which hold the same slices, call it together.
    """
    rows = Shard(0) if spec.group else Replicate()
    data = [rows if role is AxisRole.SHARD else Replicate() for role in axis_roles(mesh)]
    stride = torch.empty(spec.shape, device="meta").stride()
    shape = torch.Size(spec.shape)
    return DTensor.from_local(own_part(value), mesh, data, run_check=False, shape=shape, stride=stride).full_tensor()


def full_value(tensor: Tensor) -> Tensor:
    """Return all rows of a tensor, detached. All ranks, which have compared what they do, call it together."""
    return dtensor.replicated_value(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def own_row_count(full: Tensor, mesh: DeviceMesh) -> int:
    """Return the number of this rank's rows of a parameter that is split."""
    return len(range(len(full))[_own_rows(len(full), mesh, shard_dim(mesh))])


def _own_rows(rows: int, mesh: DeviceMesh, dim: int) -> slice:
    most, rank = chunk_rows(rows, mesh.size(dim)), mesh.get_local_rank(dim)
    return slice(rank * most, (rank + 1) * most)


def scales_like(param: Any, dtype: torch.dtype) -> Tensor:
    """Return zeros, a scale for each block of a split parameter: `[ranks, blocks]`, enough for the largest shard."""
    rows = chunk_rows(len(param), param.device_mesh.size(split_dims(param)[0]))
    scales = own_part(param).new_zeros(1, math.ceil(rows * math.prod(param.shape[1:]) / BLOCK), dtype=dtype)
    return DTensor.from_local(scales, param.device_mesh, param.placements, run_check=False)


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: its part of a `DTensor`, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distributed_like(like: Tensor, local: Tensor) -> Tensor:
    """Return a tensor distributed like another from this rank's part; `local` itself if the other is a plain tensor.

    It may be on another device than the other's part.
    """
    return dtensor.distributed_like(like, local) if isinstance(like, DTensor) else local
