"""A parameter of a partitioned model: its shard, its gathered copy and its accumulated gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsgraph.compat.autograd import version_of
from dsgraph.compat.dynamo import keep_static
from dsgraph.inductor_ext import AVERAGE, chunk_rows, resolve_group
from dsgraph.passes import ParameterSpec
from dsgraph.utils.errors import PartitionError

from .accumulation.gradient_placeholder import GradientPlaceholder
from .stages import ZeroStage
from .transforms.parameter_transform import ParameterTransform

TransformT = TypeVar("TransformT", bound=ParameterTransform)
Version = tuple[int, int, int]


def not_taken_in(name: str) -> str:
    """Return the error message for a parameter that was added to a partitioned model."""
    return (
        f"parameter {name!r} was put into the model after dsgraph.partition, and is neither sharded nor averaged: "
        "call dsgraph.partition(model) again, which takes in what is new, then give it to the optimizer"
    )


class Freshness(IntEnum):
    """Knowledge about the values of a gathered copy."""

    STALE = 0
    """The shards have changed since."""
    SUSPECT = 1
    """A gradient went through it, so an update that left no trace may have followed."""
    FRESH = 2
    """Equal to the shards."""


@dataclass(eq=False)
class ParameterState:
    """One parameter, shared by all modules that are tied to it.

    Attributes:
        spec: Its specification when it was partitioned; see `current_spec`.
        owners: The modules that hold it, each with its name there.
        zero: Its ZeRO stage.
        replicated_because: Why it is replicated; empty for a sharded parameter.
        transforms: The changes to it around its gather, in this order.
        reducer: The transform that reduces its gradient in place of the average, if there is one.
        gathered_copy: `[*shape]`, the gathered copy of stages 1 and 2; None otherwise, and for replicated parameters.
        stand_ins: Tensors `[*shape]` without memory that stand for the full parameter in graphs of units: the second
            one requires a gradient. Empty if it is read in other ways.
        updates: Number of optimizer steps on it.
        freshness: Knowledge about the gathered copy.
        leaf: What modules return while gradients are not reduced; see `accumulation`.
        accumulated_grad: `[*shape]` in the master dtype, the sum of the leaf's gradients, or zeros that wait for them.
        sum_for_graphs: `accumulated_grad` while graphs of the last micro-batch may read it; None otherwise.
        is_summed: True if the sum contains a gradient that has not been reduced.
        was_trained: True if it had `requires_grad` in a micro-batch of this step; it may be frozen by now.
        withheld: Value of the sum, while a backward runs that must not add it.
        placeholder: Placeholder in the parameter's `.grad` while there is a sum.
        hooked_param: id of the parameter that reports its gradients.
        eager_reads: Number of times that it was read outside compiled graphs.
        noted_version: Its `version` when its copy was gathered or, of a replicated parameter, when its values were last
            known to be equal on all ranks; None: unknown.
    """

    spec: ParameterSpec
    owners: list[tuple[nn.Module, str]]
    zero: ZeroStage
    replicated_because: str = ""
    transforms: tuple[ParameterTransform, ...] = ()
    reducer: ParameterTransform | None = None
    gathered_copy: Tensor | None = field(default=None, repr=False)
    stand_ins: tuple[Tensor, ...] = field(default=(), repr=False)
    updates: int = 0
    freshness: Freshness = Freshness.STALE
    leaf: Tensor | None = None
    accumulated_grad: Tensor | None = None
    sum_for_graphs: Tensor | None = None
    is_summed: bool = False
    was_trained: bool = False
    withheld: Tensor | None = None
    placeholder: GradientPlaceholder | None = None
    hooked_param: int = 0
    eager_reads: int = 0
    noted_version: Version | None = None

    def register(self, transform: ParameterTransform) -> None:
        """Add a transform, in the place of one of its kind.

        Raises:
            PartitionError: It reduces the gradient, which another transform does already, or which its stage does not
                allow.
        """
        others = [other for other in self.transforms if type(other) is not type(transform)]
        if transform.reduction != AVERAGE:
            if not self.zero.may_replace_reduction:
                raise PartitionError(
                    f"at stage {self.zero.number} the gradient of {self.name!r} is reduced in each backward, which no "
                    "transform can replace: partition with stage 0 or 1"
                )
            if any(other.reduction != AVERAGE for other in others):
                raise PartitionError(f"the gradient of {self.name!r} is reduced by another transform already")
            self.reducer = transform
        self.transforms = (*others, transform)

    def renew_stand_ins(self) -> None:
        """Make the tensors that stand for the full parameter, after its dtype or device has changed."""
        dtype, _ = self.spec.dtypes(self.param.dtype)
        ways, device = (False, True) if dtype.is_floating_point else (False,), self.param.device
        if [_kind_of(known) for known in self.stand_ins] != [(dtype, device, trained) for trained in ways]:
            self.stand_ins = tuple(self._stand_in(dtype, device, trained) for trained in ways)

    def _stand_in(self, dtype: torch.dtype, device: torch.device, trained: bool) -> Tensor:
        with torch.inference_mode(False):
            tensor = torch.empty(self.spec.shape, dtype=dtype, device=device)
        tensor.untyped_storage().resize_(0)
        keep_static(tensor)
        tensor.dsgraph_entry = self  # type: ignore[attr-defined]
        return tensor.requires_grad_(trained)

    def unregister(self, kind: type[ParameterTransform]) -> None:
        """Remove the transform of a kind, if there is one."""
        self.transforms = tuple(transform for transform in self.transforms if not isinstance(transform, kind))
        if isinstance(self.reducer, kind):
            self.reducer = None

    def find(self, kind: type[TransformT]) -> TransformT | None:
        """Return its transform of a kind, None if there is none."""
        return next((transform for transform in self.transforms if isinstance(transform, kind)), None)

    @property
    def name(self) -> str:
        """Its (first) name in the model."""
        return self.spec.name

    def current_spec(self, name: str = "") -> ParameterSpec:
        """Return the specification as the parameter is now: it may have been frozen or converted.

        Args:
            name: What a graph calls it; "": its name in the model.
        """
        return replace(
            self.spec,
            name=name or self.name,
            shard_shape=tuple(self.rows.shape),
            dtype=self.param.dtype,
            requires_grad=self.param.requires_grad,
            tier=self.tier,
        )

    @property
    def tier(self) -> str:
        """The place of its rows: "disk", or "" for memory."""
        return next((transform.tier for transform in self.transforms if transform.tier), "")

    @property
    def param(self) -> DTensor:
        """The sharded parameter as its module holds it now."""
        module, attribute = self.owners[0]
        param: DTensor = module._parameters[attribute]  # type: ignore[assignment]
        return param

    @property
    def rows(self) -> Tensor:
        """This rank's rows of it, in the master dtype.

        Raises:
            PartitionError: Another parameter has been put in its place.
        """
        if not isinstance(self.param, DTensor):
            raise PartitionError(not_taken_in(self.name))
        return self.param.to_local().detach()

    def bytes_of_rank(self, dtype: torch.dtype) -> int:
        """Return the bytes of one rank's rows of a sharded parameter in `dtype`, padded to the largest shard."""
        rows, *rest = self.spec.shape
        return chunk_rows(rows, resolve_group(self.spec.group).size()) * math.prod(rest) * dtype.itemsize

    @property
    def copy_bytes(self) -> int:
        """Bytes of a gathered copy in memory: equally many rows of each rank, some of which may be padding."""
        dtype, _ = self.spec.dtypes(self.param.dtype)
        return self.bytes_of_rank(dtype) * resolve_group(self.spec.group).size()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of this rank's rows."""
        with torch.no_grad():
            return math.prod(self.param.to_local().shape) * self.param.dtype.itemsize

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no part in the step.
        nothing = {
            "leaf": None,
            "accumulated_grad": None,
            "sum_for_graphs": None,
            "is_summed": False,
            "was_trained": False,
            "withheld": None,
            "placeholder": None,
            "reducer": None,
        }
        noted = {"hooked_param": 0, "noted_version": None}
        transforms = tuple(transform for transform in self.transforms if transform.is_copied)
        copies = {"stand_ins": tuple(map(_kind_of, self.stand_ins))}
        return {**self.__dict__, **nothing, **noted, **copies, "transforms": transforms}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stand_ins = tuple(self._stand_in(*kind) for kind in state["stand_ins"])
        if self.gathered_copy is not None:  # of which the leaf is made
            self.gathered_copy.requires_grad_(False)

    def observe(self) -> Freshness:
        """Return how fresh the gathered copy is compared with the current shard."""
        if self.version != self.noted_version:
            self.freshness = Freshness.STALE
        return self.freshness

    @property
    def version(self) -> Version:
        """Numbers that change when it is replaced, written to or updated by a fused optimizer."""
        return id(self.param), version_of(self.param), self.updates

    def note_version(self) -> None:
        """Note that the present values of a replicated parameter are equal on all ranks."""
        if self.is_replicated:
            self.noted_version = self.version

    @property
    def is_replicated(self) -> bool:
        """True if it is replicated, and no other parameter has been put in its place."""
        return not self.spec.group and isinstance(self.param, DTensor)

    @property
    def is_written(self) -> bool:
        """True if anything was written to a replicated parameter since `note_version`."""
        return self.is_replicated and self.noted_version not in (None, self.version)

    def mark_gathered(self, freshness: Freshness) -> None:
        """Note which state of the shard the gathered copy was gathered from."""
        self.noted_version, self.freshness = self.version, freshness


def _kind_of(stand_in: Tensor) -> tuple[torch.dtype, torch.device, bool]:
    return stand_in.dtype, stand_in.device, stand_in.requires_grad
