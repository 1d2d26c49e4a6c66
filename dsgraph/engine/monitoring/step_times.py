"""Times of the parts of a step: `wall_clock_breakdown`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dsgraph.utils.device_clock import Spans


class Stopwatch:
    """A stopwatch that adds up the time of forward, backward and step.

    Nothing waits for a GPU in a step: see `Spans`.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        """Create a stopwatch; one that is off does nothing at all."""
        self._is_on, self._device = is_on, device
        self._parts: dict[str, Spans] = {}
        self._steps = 0
        self._last: dict[str, float] = {}

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times a part of a step."""
        return self._measured(name) if self._is_on else nullcontext()

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        spans = self._parts.setdefault(name, Spans(self._device))
        begin = spans.begin()
        try:
            yield
        finally:
            spans.end(begin)

    def step_is_over(self) -> None:
        """Count a step."""
        self._steps += 1

    def finish_window(self) -> dict[str, float]:
        """Return the means of the steps since the last call; `means` returns them from now on."""
        self._last = self._means()
        self._parts.clear()
        self._steps = 0
        return self._last

    def means(self) -> dict[str, float]:
        """Return milliseconds a step: of the steps up to the last printed line, or of all so far if there was none."""
        return dict(self._last or self._means())

    def _means(self) -> dict[str, float]:
        return {name: spans.milliseconds() / max(self._steps, 1) for name, spans in self._parts.items()}
