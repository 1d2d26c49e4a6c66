"""Names of devices, and measurements of what they can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from .fit_line import Fit, fit_line

# How long one figure may take to measure, seconds, and how often it is measured at least and at most.
_PATIENCE = 1.0
_LEAST, _MOST = 5, 200
# Side of the square matrices that are multiplied, and bytes that are copied: on a CPU and on an accelerator. Enough to
# reach the device's rates, and more bytes than a cache holds.
_SIDE = {"cpu": 2048}
_SIDE_ELSEWHERE = 8192
_COPIED = {"cpu": 2**27}
_COPIED_ELSEWHERE = 2**30
# Bytes that go to the host and back: fewer than a cache holds, and as many as reach the link's rate.
_SENT = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
_LAUNCHES = 500  # small kernels in one go, so that the clock and the wait for the device count for nothing


@dataclass(frozen=True)
class DeviceFigures:
    """Measured performance of a device, see `CalibrationRecord`; the link to the host, None if it was not measured."""

    flops_per_s: dict[str, float]
    bytes_per_s: float
    kernel_s: float
    host: Fit | None


def synchronize(device_type: str) -> None:
    """Wait until the device has done all that it was given."""
    if device_type != "cpu":
        torch.accelerator.synchronize()


def measure_device(device_type: str, *, together: Callable[[], object]) -> DeviceFigures:
    """Measure this process's device.

    Args:
        device_type: "cpu", "cuda", ...
        together: Is called before each figure: waits for other ranks, which use the same memory at the same time in
            training.
    """
    dtypes = [torch.float32] if device_type == "cpu" else [torch.float32, torch.bfloat16]
    flops = {}
    for dtype in dtypes:
        together()
        flops[str(dtype).removeprefix("torch.")] = _matrix_flops(device_type, dtype)
    together()
    moved = _copy_rate(device_type)
    together()
    kernel = _kernel_seconds(device_type)
    together()
    return DeviceFigures(flops, moved, kernel, _host_link(device_type) if device_type == "cuda" else None)


def _matrix_flops(device_type: str, dtype: torch.dtype) -> float:
    side = _SIDE.get(device_type, _SIDE_ELSEWHERE)
    left, right = (torch.ones(side, side, dtype=dtype, device=device_type) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * side**3 / _seconds(lambda: torch.mm(left, right, out=product), device_type)


def _copy_rate(device_type: str) -> float:
    size = _COPIED.get(device_type, _COPIED_ELSEWHERE)
    source = torch.ones(size, dtype=torch.uint8, device=device_type)
    copy = torch.empty_like(source)
    return 2 * size / _seconds(lambda: copy.copy_(source), device_type)


def _kernel_seconds(device_type: str) -> float:
    value = torch.ones(1, device=device_type)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            torch.add(value, value)

    return _seconds(launch, device_type) / _LAUNCHES


def _host_link(device_type: str) -> Fit:
    """Return the link between pinned memory and the device; of the two directions the slower."""
    samples = []
    for size in _SENT:
        there = torch.ones(size, dtype=torch.uint8, device=device_type)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        ways = [(here, there), (there, here)]
        times = [_seconds(partial(to.copy_, source, non_blocking=True), device_type) for to, source in ways]
        samples.append((size, max(times)))
    return fit_line(samples)


def _seconds(function: Callable[[], object], device_type: str) -> float:
    """Return the median of how long a call takes."""
    found: list[float] = []
    function()  # the first call brings memory and libraries
    synchronize(device_type)
    end = time.perf_counter() + _PATIENCE
    while len(found) < _LEAST or (time.perf_counter() < end and len(found) < _MOST):
        start = time.perf_counter()
        function()
        synchronize(device_type)
        found.append(time.perf_counter() - start)
    return statistics.median(found)
