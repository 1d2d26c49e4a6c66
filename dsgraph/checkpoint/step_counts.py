"""The progress of a training: part of each checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class StepCounts:
    """The number of steps of a training run so far.

    Attributes:
        micro: Micro-batches whose step was called.
        steps: Optimizer steps, the skipped ones included.
        skipped: Steps whose gradients were not finite: nothing was updated.
    """

    micro: int = 0
    steps: int = 0
    skipped: int = 0


def progress_at(counts: StepCounts) -> dict[str, Any]:
    """Return the progress of a training without schedule, loss scale and data, as an engine's checkpoint stores it."""
    return {"counts": asdict(counts), "loss_scale": {}, "schedule": None}
