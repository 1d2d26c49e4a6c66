"""The choice of states to store on the host or on disk, so that the rest fits into the device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dsgraph.offload.offload_sizes import OffloadSplit, Sizes
from dsgraph.partitioning.arguments import KEEP_WHOLE_BELOW, OffloadArguments
from dsgraph.utils.byte_counts import on_device, read_bytes
from dsgraph.utils.errors import OffloadError

from .offload_optimizer import offloaded_to


@dataclass(frozen=True)
class OffloadPlan:
    """The places of the states of a model, on each rank.

    Attributes:
        tier: The place of offloaded states: "disk" below memory, "host" below a device with memory of its own.
        parameters_ratio: The offloaded share of sharded parameters and their gradients.
        optimizer_ratio: The offloaded share of the optimizer's state.
        folder: A folder on the disk; None if nothing goes there.
        memory_bytes: Bytes of the device, with the buffers of transfers, without activations.
        below_bytes: Bytes of the tier, with buffers that are there.
        buffer_bytes: Bytes of buffers on the device.
    """

    tier: str
    parameters_ratio: float
    optimizer_ratio: float
    folder: Path | None
    memory_bytes: int
    below_bytes: int
    buffer_bytes: int

    @property
    def offload(self) -> dict[str, Any] | None:
        """The argument `partition(offload=...)`; call `take` or `dsgraph.offload_optimizer` afterwards."""
        shares = {"optimizer": self.optimizer_ratio, "parameters": self.parameters_ratio}
        wanted = {what: share for what, share in shares.items() if share}
        folder = {} if self.folder is None else {"folder": str(self.folder)}
        return {**dict.fromkeys(wanted, self.tier), **folder, "ratio": wanted} if wanted else None

    def take(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer itself, or a wrapper that offloads its state.

        Raises:
            OffloadError: See `DiskOptimizer` and `HostOptimizer`.
        """
        if not self.optimizer_ratio:
            return optimizer
        folder = "" if self.folder is None else str(self.folder)
        wanted = OffloadArguments(optimizer=self.tier, folder=folder, optimizer_ratio=self.optimizer_ratio)
        return offloaded_to(wanted, optimizer)

    def limit_of_graphs(self, limit: int) -> int:
        """Return the backend's `memory_limit` with which a step uses at most `limit` bytes.

        The backend knows from `partition(offload=...)` which states are offloaded. It does not count the buffers.
        """
        return limit - self.buffer_bytes

    def __str__(self) -> str:
        if not self.optimizer_ratio:
            return f"offload: nothing; the model's states take {self.memory_bytes:,} bytes of memory"
        where, here = f"in {self.folder}", "memory"
        if self.tier == "host":
            where, here = "with buffers, in the host's memory", "the device's memory"
        return (
            f"offload: {self.optimizer_ratio:.0%} of the optimizer's state and {self.parameters_ratio:.0%} of "
            f"parameters and gradients are stored on {self.tier}, {self.below_bytes:,} bytes {where}; the model's "
            f"states take {self.memory_bytes:,} bytes of {here}"
        )


def plan_offload(
    model: nn.Module,
    *,
    memory_limit: float | str,
    folder: Path | str | None = None,
    host_memory_limit: float | str | None = None,
    device: torch.device | str = "cpu",
    stage: int = 3,
    ranks: int | None = None,
    keep_whole_below: int = KEEP_WHOLE_BELOW,
) -> OffloadPlan:
    """Plan which of a model's states must leave the device.

    On the CPU, memory is the device and the disk is the tier below it. On CUDA the host is the tier below; only the
    optimizer's state can be offloaded there yet.

    The optimizer's state is offloaded first: for each of its bytes, a step reads one and writes one. For each byte of
    parameters and gradients, three are read or written.

    Args:
        model: A model that is not partitioned yet.
        memory_limit: The memory for parameters, gradients, an optimizer's two averages and buffers on a rank's share of
            the device: bytes, a text such as "3GiB", or a share. Activations are not included.
        folder: A folder on the disk. On the CPU nothing can be offloaded without it.
        host_memory_limit: The limit of the host's memory, for CUDA. None: a rank's share of all memory.
        device: The device on which the model will be trained; it need not exist here.
        stage: The ZeRO stage with which the model will be partitioned.
        ranks: The future number of ranks; None: the current one.
        keep_whole_below: The argument of `partition`.

    Raises:
        OffloadError: It does not fit; the error names the smallest limits that suffice. Or a limit has no effect.
    """
    device = torch.device(device)
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    limit = _bytes_of("memory_limit", memory_limit, device.type)
    is_host = device.type != "cpu"
    if is_host and folder is not None:
        raise OffloadError(f"folder has no effect yet on {device.type}, which offloads to the host: leave it out")
    if not is_host and host_memory_limit is not None:
        raise OffloadError("host_memory_limit has no effect on the CPU, whose memory is the host's: set memory_limit")
    sizes = Sizes.of(model, stage, ranks, keep_whole_below, to_host=is_host)
    found = sizes.within(limit)
    if found is not None and found.states and not is_host and folder is None:
        raise OffloadError(
            f"memory_limit is {limit:,} bytes, so that states must go to disk: set folder, or set memory_limit to "
            f"{sizes.memory(OffloadSplit(0, 0)):,} or more"
        )
    if found is None:
        hint = "" if stage == 3 else f"; stage {stage} keeps parameters there, stage 3 would take less"
        where = "on the host" if is_host else "on disk"
        raise OffloadError(
            f"memory_limit is {limit:,} bytes, but the model's states need {sizes.least:,} at least, with everything "
            f"{where} that can be there: set it to that or more{hint}"
        )
    below = sizes.below(found)
    if is_host:
        _check_host(sizes, below, limit, _bytes_of("host_memory_limit", host_memory_limit or 1.0, "cpu"))
    optimizer, parameters = sizes.shares(found)
    return OffloadPlan(
        *("host" if is_host else "disk", parameters, optimizer),
        folder=Path(folder) if folder is not None and found.states else None,
        memory_bytes=sizes.memory(found),
        below_bytes=below,
        buffer_bytes=sizes.buffers(found),
    )


def _bytes_of(name: str, limit: float | str, device_type: str) -> int:
    try:
        return on_device(read_bytes(limit), device_type)  # type: ignore[arg-type]
    except ValueError as error:
        raise OffloadError(f"{name} is {limit!r}: {error}") from error


def _check_host(sizes: Sizes, below: int, limit: int, host_limit: int) -> None:
    """Refuse a plan that the host's memory cannot hold, with the smallest limits: of the host, or of the device."""
    if below <= host_limit:
        return
    least = min(sizes.memory(split) for split in sizes.splits if sizes.below(split) <= host_limit)
    raise OffloadError(
        f"memory_limit is {limit:,} bytes, so that the host has to hold {below:,}, and host_memory_limit is "
        f"{host_limit:,}: set host_memory_limit to {below:,} or more, or memory_limit to {least:,} or more"
    )
