"""The ranks that share the layers of an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh

from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.mesh import axis_group
from dsgraph.utils.errors import InferenceError


class SlicingRanks:
    """Ranks that share each layer. All of them make the same calls of an engine, with the same arguments.

    Attributes:
        mesh: Their mesh, of one dimension.
        count: Number of ranks.
        group: Name of their process group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Create the group, without communication.

        Args:
            mesh: A mesh of one dimension.
        """
        self.mesh, self.count = mesh, mesh.size()
        self.group = axis_group(mesh, 0).group_name
        self._agreement = Agreement.over(mesh)

    def confirm(self, would: str, arguments: Mapping[str, Any]) -> None:
        """Compare the arguments of a call, and the state of the random number generator, between ranks.

        Args:
            would: What the ranks would do if they differ, for the message.
            arguments: Name -> value.

        Raises:
            RanksDisagreeError: They differ, or a rank did not arrive; all ranks raise.
        """
        self._agreement.confirm(would, [f"{name}: {_said(value)}" for name, value in arguments.items()])


def all_ranks(count: int, device: torch.device) -> SlicingRanks:
    """Return the ranks of this run, which must be `count`.

    Raises:
        InferenceError: Their number differs, or there is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InferenceError(
            f"init_inference: mp_size is {count}, but there is one rank: start {count} ranks, for example with "
            f"`dsgraph run --nproc {count}`, and call dist.init_process_group first"
        )
    if dist.get_world_size() != count:
        raise InferenceError(
            f"init_inference: mp_size is {count}, and there are {dist.get_world_size()} ranks: the two must be equal"
        )
    return SlicingRanks(dist.init_device_mesh(device.type, (count,), mesh_dim_names=("tp",)))


def _said(value: Any) -> str:
    """Return a text that is equal for equal arguments, also in other processes."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().view(torch.uint8) if value.numel() else value.cpu()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None), list, tuple, dict)) else _kind(value)


def _kind(value: Any) -> str:
    # Streamers, processors and criteria are objects of each process.
    return type(value).__qualname__
