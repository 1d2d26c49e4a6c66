"""Placement of the rows of a parameter on a mesh, and broadcasts that give all ranks the same values."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard

from dsgraph.compat import dtensor
from dsgraph.inductor_ext import chunk_rows
from dsgraph.passes import AxisRole, ParameterSpec
from dsgraph.ranks.mesh import axis_roles, shard_dim


def placements_for(spec: ParameterSpec, mesh: DeviceMesh) -> list[Placement]:
    """Return the placement of a parameter on the mesh: rows sharded over the sharding dimension, or replicated."""
    is_split = bool(spec.group)
    return [Shard(0) if is_split and role is AxisRole.SHARD else Replicate() for role in axis_roles(mesh)]


def broadcast_from_first(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Overwrite `tensor` on every rank of the mesh with that of the first."""
    for dim in range(mesh.ndim):  # to the first rank of every row of the mesh, then along the rows
        group = mesh.get_group(dim)
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group)


def local_rows(full: Tensor, spec: ParameterSpec, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a full parameter, in memory of their own."""
    return rows_in(full, spec, mesh).clone()


def rows_in(full: Tensor, spec: ParameterSpec, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a full parameter, in the memory of the full one."""
    if not spec.group:
        return full
    return full[_own_rows(len(full), mesh)]


def rows_like(param: Tensor, full: Tensor) -> Tensor:
    """Return this rank's rows of a full tensor, split as those of `param`; in memory of their own if it is split."""
    if not isinstance(param, DTensor) or not any(placement.is_shard() for placement in param.placements):
        return full
    return full[_own_rows(len(full), param.device_mesh)].clone()


def own_row_count(full: Tensor, mesh: DeviceMesh) -> int:
    """Return the number of this rank's rows of a parameter that is split."""
    return len(range(len(full))[_own_rows(len(full), mesh)])


def _own_rows(rows: int, mesh: DeviceMesh) -> slice:
    dim = shard_dim(mesh)
    most, rank = chunk_rows(rows, mesh.size(dim)), mesh.get_local_rank(dim)
    return slice(rank * most, (rank + 1) * most)


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: its part of a `DTensor`, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distributed_like(like: Tensor, local: Tensor) -> Tensor:
    """Return a tensor distributed like another from this rank's part; `local` itself if the other is a plain tensor.

    It may be on another device than the other's part.
    """
    return dtensor.distributed_like(like, local) if isinstance(like, DTensor) else local
