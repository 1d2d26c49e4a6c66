"""The speed of training."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
