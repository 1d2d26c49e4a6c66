"""`offload_optimizer`: move an optimizer's state to the place that `partition(offload=...)` names."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from dsgraph.partitioning.arguments import OffloadArguments
from dsgraph.partitioning.state import partition_states
from dsgraph.utils.errors import OffloadError

from .delayed import DelayedHostOptimizer
from .disk_optimizer import DiskOptimizer
from .host_optimizer import HostOptimizer


def offload_optimizer(
    optimizer: Optimizer, model: nn.Module, *, delayed: bool = False, pin_memory: bool = True
) -> Optimizer:
    """Return an optimizer whose state is stored as `partition(model, offload={"optimizer": ...})` says.

    Use the returned optimizer for learning rate schedules, `state_dict` and `zero_grad`.

    Args:
        optimizer: An optimizer of the model's parameters that has not stepped.
        model: A model that was partitioned with this argument.
        delayed: With "host": True computes each update during the next step's forward and backward, and applies it one
            step late.
        pin_memory: With "host": True uses pinned memory for copies to and from CUDA.

    Returns:
        The optimizer to step.

    Raises:
        OffloadError: The model was partitioned without this argument, or not with "host" if `delayed` is True; see also
            `HostOptimizer` and `DiskOptimizer`.
    """
    found = {part.arguments.offload for part in partition_states(model)}
    wanted = [offload for offload in found if offload.optimizer]
    if len(wanted) != 1 or len(found) != 1:
        raise OffloadError(
            f"offload_optimizer: {type(model).__name__} was not partitioned with one offload for all of it that names "
            f'an "optimizer" ({", ".join(map(str, found)) or "it was not partitioned"}): call dsgraph.partition(model, '
            'offload={"optimizer": "host" or "disk", ...}) first'
        )
    return offloaded_to(wanted[0], optimizer, delayed=delayed, pin_memory=pin_memory)


def offloaded_to(
    wanted: OffloadArguments, optimizer: Optimizer, *, delayed: bool = False, pin_memory: bool = True
) -> Optimizer:
    """Return the same, by the arguments that `partition` has stored."""
    if wanted.optimizer == "disk":
        if delayed:
            raise OffloadError('delayed: the optimizer is on "disk", but only updates on the "host" can be delayed')
        folder = Path(wanted.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return DiskOptimizer(optimizer, folder=folder, ratio=wanted.optimizer_ratio)
    if not delayed:
        return HostOptimizer(optimizer, ratio=wanted.optimizer_ratio, pin_memory=pin_memory)
    if wanted.optimizer_ratio != 1:
        raise OffloadError(
            f"delayed: {wanted.optimizer_ratio:.0%} of the state is on the host, and the device would update the rest "
            "at once: leave the ratio out"
        )
    return DelayedHostOptimizer(optimizer, pin_memory=pin_memory)
