"""The device of the GPU tests: CUDA, or the CPU for a rehearsal (`DSGRAPH_GPU_DEVICE=cpu`)."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

KIND = os.environ.get("DSGRAPH_GPU_DEVICE", "cuda")
ON_CUDA = KIND == "cuda"
ROOT = Path(__file__).parents[2]


def the_device() -> torch.device:
    """Return the device to test on, which on CUDA becomes the current one."""
    if not ON_CUDA:
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def synchronize() -> None:
    """Wait for the device."""
    if ON_CUDA:
        torch.cuda.synchronize()


def error_of(got: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference over the norm of `truth`, both in float64."""
    got, truth = got.detach().double().cpu(), truth.detach().double().cpu()
    assert got.shape == truth.shape
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} numbers are not finite"
    return float((got - truth).norm() / truth.norm().clamp_min(1e-30))


def host_waits(function: Callable[[], object]) -> dict[str, int]:
    """Return where the host waits for the device in a call: {"file:line": times}; nothing on the CPU."""
    if not ON_CUDA:
        function()
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The mode itself warns once a process that it is a prototype.
    texts = [(str(item.message), item) for item in caught]
    found = [item for text, item in texts if "synchroniz" in text and "prototype" not in text]
    return dict(Counter(f"{_short(item.filename)}:{item.lineno}" for item in found))


def _short(path: str) -> str:
    return path.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
