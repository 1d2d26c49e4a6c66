"""`offload_optimizer`: an optimizer's state goes to where `partition(offload=...)` says."""

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
    """What steps an optimizer as `partition(model, offload={"optimizer": ...})` asks for.

    A schedule of learning rates, `state_dict` and `zero_grad` are those of what is returned.

    Args:
        optimizer: Of the model's parameters; it has not stepped.
        model: It was partitioned so.
        delayed: With "host": computes each update while the next step's gradients are, and applies it one step late.
        pin_memory: With "host": whether what is copied to and from CUDA is pinned.

    Returns:
        The optimizer to step.

    Raises:
        OffloadError: The model's optimizer was not to be offloaded, not to the host if it is to be delayed, or see
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
    """The same, by what `partition` has written down of its `offload`."""
    if wanted.optimizer == "disk":
        if delayed:
            raise OffloadError('delayed: the optimizer is on "disk"; an update is delayed on the "host" alone')
        folder = Path(wanted.folder)
        folder.mkdir(parents=True, exist_ok=True)
        return DiskOptimizer(optimizer, folder=folder, ratio=wanted.optimizer_ratio)
    if not delayed:
        return HostOptimizer(optimizer, ratio=wanted.optimizer_ratio, pin_memory=pin_memory)
    if wanted.optimizer_ratio != 1:
        raise OffloadError(
            f"delayed: {wanted.optimizer_ratio:.0%} of the state is on the host, and the device would step at once: "
            "leave the ratio out"
        )
    return DelayedHostOptimizer(optimizer, pin_memory=pin_memory)
