"""The device mesh of a partitioned model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh

from dsgraph.inductor_ext import backend_name, resolve_group
from dsgraph.passes import AxisRole, MeshAxis
from dsgraph.utils.errors import PartitionError


def resolve_mesh(mesh: DeviceMesh | None, model: nn.Module) -> DeviceMesh:
    """Return the mesh to partition over: the given one, checked, or one dimension over all ranks.

    Raises:
        PartitionError: The mesh has more than two dimensions, is on other devices than the model, or this rank is
            not part of it.
    """
    devices = parameter_devices(model)
    if len(devices) > 1:
        raise PartitionError(
            f"parameters are on several kinds of device ({', '.join(devices)}); move the model to one first"
        )
    if mesh is None:
        return _default_mesh(devices[0] if devices else None)
    if not isinstance(mesh, DeviceMesh):
        raise PartitionError(
            f"mesh is {mesh!r}; it takes a DeviceMesh (torch.distributed.device_mesh.init_device_mesh) or None"
        )
    if mesh.ndim > 2:
        raise PartitionError(
            f"mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}; partition takes one (shard) or two (replicate, "
            "shard): pass a sub-mesh, such as mesh['data']"
        )
    if devices and mesh.device_type != devices[0]:
        raise PartitionError(
            f"mesh is on {mesh.device_type!r}, the model's parameters are on {devices[0]!r}: "
            f"move the model, or build the mesh with init_device_mesh({devices[0]!r}, ...)"
        )
    if mesh.get_coordinate() is None:
        raise PartitionError(f"rank {dist.get_rank()} is not part of the mesh {mesh}")
    return mesh


def mesh_axes(mesh: DeviceMesh) -> tuple[MeshAxis, ...]:
    """Return the axes of a mesh as plain data."""
    roles = axis_roles(mesh)
    names = mesh.mesh_dim_names or tuple(role.value for role in roles)
    axes = []
    for dim, (name, role) in enumerate(zip(names, roles, strict=True)):
        group = axis_group(mesh, dim)
        axes.append(MeshAxis(name, mesh.size(dim), group.group_name, backend_name(group, mesh.device_type), role))
    return tuple(axes)


def axis_roles(mesh: DeviceMesh) -> tuple[AxisRole, ...]:
    """Return the role of each dimension of a mesh: one is shard, two are replicate and shard, whatever their names."""
    return (*[AxisRole.REPLICATE] * (mesh.ndim - 1), AxisRole.SHARD)


def shard_dim(mesh: DeviceMesh) -> int:
    """Return the dimension of a mesh over which rows are sharded."""
    return axis_roles(mesh).index(AxisRole.SHARD)


def ranks_along(mesh: DeviceMesh, groups: Collection[str]) -> tuple[int, ...]:
    """Return the ranks of a mesh that differ from this one only along the dimensions with these groups, in order."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is part of the mesh"
    place = tuple(
        slice(None) if axis_group(mesh, dim).group_name in groups else coordinate[dim] for dim in range(mesh.ndim)
    )
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))


def axis_group(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup:
    """Return the process group of one dimension of a mesh.

    It is found by its name, as in the ops: torch keeps meshes of captured inputs and reuses them for equal ones, even
    after the process group was destroyed and created again.
    """
    return resolve_group(mesh.get_group(dim).group_name)


def mesh_ranks(mesh: DeviceMesh) -> list[int]:
    """Return the global ranks of a mesh, in order."""
    return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def parameter_devices(model: nn.Module) -> list[str]:
    """Return the device types of the parameters, "meta" left out."""
    return sorted(_kinds(model.parameters()) - {"meta"})


def _kinds(tensors: Iterable[torch.Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors}


def _default_mesh(device: str | None) -> DeviceMesh:
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator is not None else "cpu"
    if not dist.is_initialized():
        _join_process_group(device)
    _refuse_other_device(device)
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _refuse_other_device(device: str) -> None:
    """Refuse a process group that cannot communicate tensors of the model's device.

    Raises:
        PartitionError: The process group uses NCCL, and the model is on the CPU.
    """
    if device == "cpu" and dist.get_backend() == "nccl":
        raise PartitionError(
            "the model is on the CPU, and the process group uses NCCL, which cannot communicate CPU tensors: call "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) and move the model with model.cuda() before partition"
        )


def _join_process_group(device: str) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # set by torchrun
        dist.init_process_group(device_id=None)
        return
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
