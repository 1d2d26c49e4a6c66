"""The device of a rank, its mesh, and its number in a mesh."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from dsgraph.ranks.local_rank import local_rank
from dsgraph.utils.errors import ConfigError

from .config.engine_config import ParallelConfig


def join_ranks() -> None:
    """Join the process group that a launcher has named."""
    if not dist.is_initialized() and "RANK" in os.environ:
        dist.init_process_group()


def device_of_rank() -> torch.device:
    """Return the device on which this rank computes, and make it the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank(torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def layout_meshes(layout: ParallelConfig, device: torch.device) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the ranks that hold the same slices of a model, and those that share it; None, None if tp is 1.

    Args:
        layout: The section `parallel`, without pipeline stages.
        device: The device of this rank.

    Raises:
        ConfigError: There are more or fewer ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout.dp * layout.tp != world:
        raise ConfigError(
            f"parallel: dp {layout.dp} x tp {layout.tp} need {layout.dp * layout.tp} ranks, but there are {world}"
        )
    if layout.tp == 1:
        return None, None
    mesh = dist.init_device_mesh(device.type, (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def place_in(mesh: DeviceMesh) -> int:
    """Return this rank's number in the mesh, row by row."""
    place = 0
    for dim in range(mesh.ndim):
        place = place * mesh.size(dim) + mesh.get_local_rank(dim)
    return place
