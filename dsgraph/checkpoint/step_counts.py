"""How far training is: part of each checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


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
