"""The device of a rank, and its number in a mesh."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh

from dsgraph.ranks.local_rank import local_rank


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


def place_in(mesh: DeviceMesh) -> int:
    """Return this rank's number in the mesh, row by row."""
    place = 0
    for dim in range(mesh.ndim):
        place = place * mesh.size(dim) + mesh.get_local_rank(dim)
    return place
