"""Times of the parts of a step: `wall_clock_breakdown`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_MOST_WAITING = 512
"""Largest number of events that wait to be read: by then the device has long passed the first ones."""


class Stopwatch:
    """A stopwatch that adds up the time of forward, backward and step.

    On a GPU events are recorded, and read when the times are needed: nothing waits for the device in a step. There, the
    time of a part is that of its kernels; on the CPU, that of the call.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        """Create a stopwatch; one that is off does nothing at all."""
        self._is_on, self._on_gpu = is_on, device.type == "cuda"
        self._waiting: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._sums: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._last: dict[str, float] = {}

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times a part of a step."""
        return self._measured(name) if self._is_on else nullcontext()

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self._waiting[name].append((begin, self._now()))
            if len(self._waiting[name]) == _MOST_WAITING:
                self._read()

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step_is_over(self) -> None:
        """Count a step."""
        self._steps += 1

    def finish_window(self) -> dict[str, float]:
        """Return the means of the steps since the last call; `means` returns them from now on."""
        self._last = self._means()
        self._sums.clear()
        self._steps = 0
        return self._last

    def means(self) -> dict[str, float]:
        """Return milliseconds a step: of the steps up to the last printed line, or of all so far if there was none."""
        return dict(self._last or self._means())

    def _means(self) -> dict[str, float]:
        self._read()
        return {name: value / max(self._steps, 1) for name, value in self._sums.items()}

    def _read(self) -> None:
        for name, pairs in self._waiting.items():
            self._sums[name] += sum(self._milliseconds(*pair) for pair in pairs)
        self._waiting.clear()

    def _milliseconds(self, begin: Any, end: Any) -> float:
        if not self._on_gpu:
            return float(1000 * (end - begin))
        end.synchronize()
        return float(begin.elapsed_time(end))
