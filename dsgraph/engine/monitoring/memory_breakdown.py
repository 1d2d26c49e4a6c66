"""Memory of a rank by use: `memory_breakdown`."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from dsgraph.partitioning.rows import own_part
from dsgraph.partitioning.state import PartitionState


def memory_use(partition: PartitionState, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of a rank: those that outlive a step, and the peak."""
    entries = partition.parameters
    copies = (getattr(entry, "gathered_copy", None) for entry in entries)
    state = (value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor))
    found = {
        "parameters": _bytes(entry.param for entry in entries),
        "gathered copies": _bytes(copy for copy in copies if copy is not None),
        "gradients": _bytes(entry.param.grad for entry in entries if entry.param.grad is not None),
        "optimizer state": _bytes(state),
    }
    return {**found, "peak so far": peak_bytes(entries[0].param.device)}


def peak_bytes(device: torch.device) -> int:
    """Return the peak of memory: of torch's allocator on a GPU, otherwise of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # If the system reports it: the peak of this program alone. That of `getrusage` includes the program before `exec`.
    return status_bytes("VmHWM") or (most if sys.platform == "darwin" else 1024 * most)


def status_bytes(which: Literal["VmRSS", "VmHWM"]) -> int:
    """Return the resident memory of the process, or its peak; 0 where the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{which}:")), 0)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's rows, each storage once."""
    local = [own_part(tensor) for tensor in tensors]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}.values())
