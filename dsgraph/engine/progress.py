"""How far training is, and the lines that say so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from .read_config import ResolvedConfig


@dataclass
class StepCounts:
    """How far training is.

    Attributes:
        micro: Micro-batches whose step was called.
        steps: Optimizer steps, the skipped ones included.
        skipped: Steps whose gradients were not finite: nothing was updated.
    """

    micro: int = 0
    steps: int = 0
    skipped: int = 0


class StepLines:
    """Prints a line every `steps_per_print` steps, on the first rank."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        """Begins to measure the time."""
        self._resolved = resolved
        self._then, self._before = time.perf_counter(), 0

    def after(self, counts: StepCounts, rates: Sequence[float], scale: float) -> None:
        """Hears that a step is over, and prints if it is time."""
        config = self._resolved.config
        every, steps = config.steps_per_print, counts.steps
        if not every or steps % every or dist.get_rank() != 0:
            return
        now = time.perf_counter()
        speed = (steps - self._before) * self._resolved.batch.step / (now - self._then)
        self._then, self._before = now, steps
        learning = ", ".join(f"{rate:.4g}" for rate in rates)
        scaled = f", loss scale {scale:g}" if config.fp16.enabled else ""
        skipped = f", {counts.skipped} skipped" if counts.skipped else ""
        print(f"step {steps}{skipped}: lr {learning}{scaled}, {speed:.4g} samples/s", flush=True)
