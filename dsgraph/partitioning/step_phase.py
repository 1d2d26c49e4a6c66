"""The phases of a step of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class StepPhase(Enum):
    """The phase of a model between two optimizer steps; `FOLLOWING` says which may come next."""

    IDLE = "idle"
    """Outside `accumulate`, nothing added up: each backward reduces its gradients."""
    REDUCING_EACH = "reducing each"
    """Inside `accumulate`, and each backward reduces its gradients."""
    ADDING = "adding"
    """Inside `accumulate`: gradients are added up on this rank."""
    LAST = "last"
    """Outside, after `ADDING`: the next backward ends the step."""
    ENDING = "ending"
    """That backward runs, and reduces at its end what its graphs have not; or it has failed, and another one will."""


FOLLOWING: Mapping[StepPhase, tuple[StepPhase, ...]] = MappingProxyType(
    {
        StepPhase.IDLE: (StepPhase.REDUCING_EACH, StepPhase.ADDING),
        StepPhase.REDUCING_EACH: (StepPhase.IDLE, StepPhase.ADDING),
        StepPhase.ADDING: (StepPhase.LAST, StepPhase.IDLE),
        StepPhase.LAST: (StepPhase.ENDING, StepPhase.ADDING, StepPhase.IDLE),
        StepPhase.ENDING: (StepPhase.IDLE, StepPhase.ADDING),
    }
)
