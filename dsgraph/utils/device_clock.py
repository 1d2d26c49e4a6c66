"""A clock that does not make the host wait for the device."""

from __future__ import annotations

import time
from typing import Any

import torch

_MOST_UNREAD = 512
"""Largest number of unread spans: by then the device has long passed the first ones."""


class Spans:
    """A sum of spans of time, in milliseconds.

    On a GPU events are recorded, and read when the sum is needed. There, a span is the time of its kernels and of the
    gaps between them; on the CPU, that of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._unread: list[tuple[Any, Any]] = []
        self._sum = 0.0

    def begin(self) -> Any:
        """Return the mark with which a span begins."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, begin: Any) -> None:
        """Add the span from a mark until now."""
        self._unread.append((begin, self.begin()))
        if len(self._unread) == _MOST_UNREAD:
            self.milliseconds()

    def milliseconds(self) -> float:
        """Return the sum of all spans; waits until the device has reached the end of the last one."""
        self._sum += sum(self._between(*span) for span in self._unread)
        self._unread.clear()
        return self._sum

    def _between(self, begin: Any, end: Any) -> float:
        if not self._on_gpu:
            return float(1000 * (end - begin))
        end.synchronize()
        return float(begin.elapsed_time(end))
