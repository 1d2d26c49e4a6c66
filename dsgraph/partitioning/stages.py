"""The ZeRO stages: what each of them splits, how long its gathered copies live, and when it reduces gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class CopyLifetime(Enum):
    """How long the gathered copy of a split parameter lives."""

    NONE = "none"
    """There is none: every rank holds the parameter replicated."""
    ALWAYS = "always"
    """As long as the model. It is gathered anew after each optimizer step."""
    USE = "use"
    """Around each use. Where memory is spare, `accumulate` lets some copies live for a step of micro-batches."""


@dataclass(frozen=True)
class ZeroStage:
    """One stage. Whatever depends on the stage asks for one of these fields, never for the number.

    Attributes:
        number: What users call it.
        splits_parameters: Whether rows of a parameter are split over ranks, unless the parameter is too small.
        copy_lifetime: How long the gathered copy of a split parameter lives.
        may_reduce_once: Whether `accumulate` can add gradients up on each rank, at full size, and reduce the sum once.
        may_reduce_in_every_backward: Whether `accumulate` can reduce in every backward instead. A stage that can do
            both does so unless it is asked to reduce once.
    """

    number: int
    splits_parameters: bool
    copy_lifetime: CopyLifetime
    may_reduce_once: bool
    may_reduce_in_every_backward: bool

    @property
    def gathers_each_use(self) -> bool:
        """Whether a parameter is gathered around each use."""
        return self.copy_lifetime is CopyLifetime.USE

    @property
    def reduces_once(self) -> bool:
        """Whether `accumulate` reduces gradients once a step if nothing else is asked for."""
        return not self.may_reduce_in_every_backward

    @property
    def may_replace_reduction(self) -> bool:
        """True if a transform may reduce gradients: it takes one a step, of full size on every rank."""
        return not self.may_reduce_in_every_backward

    def allows(self, *, reduce_once: bool) -> bool:
        """Whether `accumulate(model, reduce_once=...)` can be had."""
        return self.may_reduce_once if reduce_once else self.may_reduce_in_every_backward


STAGES: Mapping[int, ZeroStage] = MappingProxyType(
    {
        stage.number: stage
        for stage in (
            ZeroStage(
                number=0,
                splits_parameters=False,
                copy_lifetime=CopyLifetime.NONE,
                may_reduce_once=True,
                may_reduce_in_every_backward=False,
            ),
            ZeroStage(
                number=1,
                splits_parameters=True,
                copy_lifetime=CopyLifetime.ALWAYS,
                may_reduce_once=True,
                may_reduce_in_every_backward=False,
            ),
            ZeroStage(
                number=2,
                splits_parameters=True,
                copy_lifetime=CopyLifetime.ALWAYS,
                may_reduce_once=True,
                may_reduce_in_every_backward=True,
            ),
            ZeroStage(
                number=3,
                splits_parameters=True,
                copy_lifetime=CopyLifetime.USE,
                may_reduce_once=False,
                may_reduce_in_every_backward=True,
            ),
        )
    }
)
