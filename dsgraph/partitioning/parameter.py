"""A parameter of a partitioned model, with what a step keeps of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.compat.autograd import version_of
from dsgraph.inductor_ext import resolve_group

from .accumulation.gradient_placeholder import StandIn
from .table import ShardedParameter
from .transforms.compression import Compression


class Freshness(IntEnum):
    """What is known about a gathered copy."""

    STALE = 0
    """The shards have changed since."""
    SUSPECT = 1
    """A gradient went through it, so an update that left no trace may have followed."""
    FRESH = 2
    """Equal to the shards."""


@dataclass(eq=False)
class ParameterState(ShardedParameter):
    """A parameter, with what a step keeps of it.

    Attributes:
        gathered_copy: `[*shape]`, the gathered copy of stages 1 and 2, and while it is held for a step that of stage 3;
            None otherwise, and for whole parameters.
        is_held_for_step: Whether stage 3 holds a gathered copy from the first micro-batch of a step to the last.
        freshness: What is known of the gathered copy.
        leaf: What modules hand out while gradients are not reduced; see `accumulation`.
        accumulated_grad: `[*shape]` in the master dtype, the sum of the leaf's gradients, or zeros that wait for them.
        is_summed: Whether anything is in the sum that has not been reduced.
        was_trained: True if it had `requires_grad` in a micro-batch of this step; it may be frozen by now.
        withheld: What was in the sum, while a backward runs that must not add it.
        stand_in: Placeholder in the parameter's `.grad` while there is a sum.
        hooked_leaf: id of the leaf that reports its gradients.
        hooked_param: id of the parameter that does so.
        compression: What is kept to compress its gradient, if it is compressed.
        noted_version: Of a replicated parameter, when its values were last known to be equal on all ranks; -1: unknown.
    """

    gathered_copy: Tensor | None = None
    is_held_for_step: bool = False
    freshness: Freshness = Freshness.STALE
    leaf: Tensor | None = None
    accumulated_grad: Tensor | None = None
    is_summed: bool = False
    was_trained: bool = False
    withheld: Tensor | None = None
    stand_in: StandIn | None = None
    hooked_leaf: int = 0
    hooked_param: int = 0
    compression: Compression | None = None
    noted_version: int = -1
    _gathered_from: Any = None
    _gathered_version: int = -1

    @property
    def copy_bytes(self) -> int:
        """What a gathered copy takes in memory: equally many rows of each rank, of which some may be padding."""
        dtype, _ = self.layout.dtypes(self.param.dtype)
        return self.bytes_of_rank(dtype) * resolve_group(self.layout.group).size()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no part in the step.
        gathered_copy = None if self.layout.zero.gathers_each_use else self.gathered_copy
        nothing = {
            "leaf": None,
            "accumulated_grad": None,
            "is_summed": False,
            "was_trained": False,
            "withheld": None,
            "stand_in": None,
            "compression": None,
        }
        noted = {"hooked_leaf": 0, "hooked_param": 0, "noted_version": -1, "stored": None}
        return {**self.__dict__, **nothing, **noted, "gathered_copy": gathered_copy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.gathered_copy is not None:  # of which the leaf is made
            self.gathered_copy.requires_grad_(False)

    def observe(self) -> Freshness:
        """How fresh the gathered copy is with respect to the shard as it is now."""
        param = self.param
        if param is not self._gathered_from or version_of(param) != self._gathered_version:
            self.freshness = Freshness.STALE
        return self.freshness

    def note_version(self) -> None:
        """Takes the present values of a replicated parameter for equal on all ranks."""
        if self.is_replicated:
            self.noted_version = version_of(self.param)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it; not where another parameter has been put in its place."""
        return not self.layout.group and isinstance(self.param, DTensor)

    @property
    def is_written(self) -> bool:
        """Whether anything was written to a replicated parameter since `note_version`."""
        return self.is_replicated and self.noted_version not in (-1, version_of(self.param))

    def mark_gathered(self, freshness: Freshness) -> None:
        """Notes which state of the shard the gathered copy was gathered from."""
        self._gathered_from = self.param
        self._gathered_version = version_of(self.param)
        self.freshness = freshness
