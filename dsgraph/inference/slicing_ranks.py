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
        mesh: They, of one dimension.
        count: How many.
        group: Name of their process group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Sends nothing.

        Args:
            mesh: Of one dimension.
        """
        self.mesh, self.count = mesh, mesh.size()
        self.group = axis_group(mesh, 0).group_name
        self._agreement = Agreement.over(mesh)

    def confirm(self, would: str, arguments: Mapping[str, Any]) -> None:
        """Compares what is given to a call, and the state from which random numbers are drawn.

        Args:
            would: What ranks are about to do if they differ, for the message.
            arguments: Name -> value.

        Raises:
            RanksDisagreeError: They differ, or a rank did not come; all ranks raise.
        """
        self._agreement.confirm(would, [f"{name}: {_said(value)}" for name, value in arguments.items()])


def all_ranks(count: int, device: torch.device) -> SlicingRanks:
    """The ranks of this run, which are to be `count`.

    Raises:
        InferenceError: There are others, or none that could talk.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InferenceError(
            f"init_inference: mp_size is {count}, and there is one rank: start {count} of them, such as by "
            f"`dsgraph run --nproc {count}`, and call dist.init_process_group first"
        )
    if dist.get_world_size() != count:
        raise InferenceError(
            f"init_inference: mp_size is {count}, and there are {dist.get_world_size()} ranks: they are to be equal"
        )
    return SlicingRanks(dist.init_device_mesh(device.type, (count,), mesh_dim_names=("tp",)))


def _said(value: Any) -> str:
    """Equal for equal arguments, also of other processes."""
    if isinstance(value, Tensor):
        content = value.detach().cpu().contiguous().view(torch.uint8) if value.numel() else value.cpu()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None), list, tuple, dict)) else _kind(value)


def _kind(value: Any) -> str:
    # Streamers, processors and criteria are objects of each process.
    return type(value).__qualname__
