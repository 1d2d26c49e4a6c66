"""Times and speed of steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Work:
    """The amount of work done so far.

    Attributes:
        samples: Number of samples, over all ranks.
        tokens: Number of tokens, over all ranks; 0 if batches contain none.
        flops: Floating-point operations of one rank; None where they are not known.
    """

    samples: int = 0
    tokens: int = 0
    flops: int | None = None


@dataclass
class Speed:
    """A meter of the speed of training between two calls of `look`."""

    _then: float = field(default_factory=time.perf_counter)
    _before: Work = Work()

    def look(self, now: Work) -> dict[str, float]:
        """Return the work per second since the last call: `samples_per_s`; `tokens_per_s` and `tflops` if known."""
        at, before = time.perf_counter(), self._before
        seconds, self._then, self._before = at - self._then, at, now
        found = {"samples_per_s": (now.samples - before.samples) / seconds}
        if now.tokens:
            found["tokens_per_s"] = (now.tokens - before.tokens) / seconds
        if now.flops is not None:
            found["tflops"] = (now.flops - (before.flops or 0)) / seconds / 1e12
        return found


def tokens_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of tokens of a micro-batch.

    These are the elements of `input_ids`, or of the first integer tensor of two or more dimensions.
    """
    values = [kwargs["input_ids"]] if "input_ids" in kwargs else [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, Tensor) and value.dim() >= 2 and value.dtype in (torch.int64, torch.int32):
            return value.numel()
    return 0
