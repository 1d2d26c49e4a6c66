"""The ZeRO stages: what each shards, how long its gathered copies live, and when it reduces gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class CopyLifetime(Enum):
    """The lifetime of the gathered copy of a sharded parameter."""

    NONE = "none"
    """There is no copy: the parameter is replicated."""
    ALWAYS = "always"
    """As long as the model. It is gathered again after each optimizer step."""
    USE = "use"
    """Around each use. If memory is spare, the graph of the step holds those of blocks for all micro-batches."""


@dataclass(frozen=True)
class ZeroStage:
    """One stage. Code that depends on the stage reads one of these fields, never the number.

    Attributes:
        number: Its number.
        splits_parameters: True if rows of a parameter are sharded over ranks, unless the parameter is too small.
        copy_lifetime: How long the gathered copy of a sharded parameter lives.
        may_reduce_once: True if `accumulate` can add gradients up on each rank, at full size, and reduce the sum once.
        may_reduce_in_every_backward: True if `accumulate` can reduce in every backward instead. A stage that supports
            both does so unless it is asked to reduce once.
    """

    number: int
    splits_parameters: bool
    copy_lifetime: CopyLifetime
    may_reduce_once: bool
    may_reduce_in_every_backward: bool

    @property
    def gathers_each_use(self) -> bool:
        """True if a parameter is gathered around each use."""
        return self.copy_lifetime is CopyLifetime.USE

    @property
    def reduces_once(self) -> bool:
        """True if `accumulate` reduces gradients once a step by default."""
        return not self.may_reduce_in_every_backward

    @property
    def may_replace_reduction(self) -> bool:
        """True if a transform may reduce gradients: it expects one full gradient a step on every rank."""
        return not self.may_reduce_in_every_backward

    def allows(self, *, reduce_once: bool) -> bool:
        """Return whether `accumulate(model, reduce_once=...)` is supported."""
        return self.may_reduce_once if reduce_once else self.may_reduce_in_every_backward


_LIFETIMES = (CopyLifetime.NONE, CopyLifetime.ALWAYS, CopyLifetime.ALWAYS, CopyLifetime.USE)

STAGES: Mapping[int, ZeroStage] = MappingProxyType(
    {
        number: ZeroStage(
            number,
            splits_parameters=number >= 1,
            copy_lifetime=lifetime,
            may_reduce_once=number <= 2,
            may_reduce_in_every_backward=number >= 2,
        )
        for number, lifetime in enumerate(_LIFETIMES)
    }
)
