"""Sources of full tensors: they can be gathered again, and writes go back to the shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsgraph.compat.autograd import version_of
from dsgraph.inductor_ext import share_memory
from dsgraph.partitioning.rows import broadcast_from_first, local_rows
from dsgraph.partitioning.state import PartitionState
from dsgraph.passes import ParameterSpec
from dsgraph.utils.errors import PartitionError


@dataclass(eq=False)
class Source:
    """A parameter, or its gradient, whose full value was returned to the user.

    Attributes:
        name: Its name in errors.
        shards: The parameter or the gradient.
        plain: The returned full value, in the dtype that the forward sees.
        spec: The parameter.
        partition: The model that it is part of.
        read: Reads the full value again, which may be `plain` itself, brought up to date.
    """

    name: str
    shards: DTensor
    plain: Tensor
    spec: ParameterSpec
    partition: PartitionState
    read: Callable[[], Tensor]
    _seen: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self._state()

    def refresh(self) -> None:
        """Gather again, in place, if the shards have changed since. All ranks call it together."""
        self.partition.copies.arrived(self.plain)
        if self._seen != self._state():
            with torch.no_grad():
                full = self.read()
                if not share_memory(full, self.plain):
                    self.plain.copy_(full)
            self._seen = self._state()

    @torch.compiler.disable
    def open(self) -> Tensor:
        """Return the current full value, in the dtype of the shards, contiguous. All ranks call it together.

        Writes to it take effect with `store`; for a replicated parameter it may be the memory itself.
        """
        with torch.inference_mode(False), torch.no_grad():
            shards = self.shards.detach()
            assert isinstance(shards, DTensor)
            return shards.full_tensor().contiguous()

    @torch.compiler.disable
    def store(self, full: Tensor) -> None:
        """Set the shards to `full` of the mesh's first rank. All ranks call it together."""
        if tuple(full.shape) != self.spec.full_shape:
            raise PartitionError(
                f"{self.name} is {list(self.spec.full_shape)}; {list(full.shape)} cannot be written to it, "
                "because a partitioned parameter keeps its shape"
            )
        with torch.inference_mode(False), torch.no_grad():
            full = full.contiguous()
            broadcast_from_first(full, self.partition.parameter_mesh)
            self.shards.to_local().copy_(local_rows(full, self.spec, self.partition.mesh))
            torch.autograd.graph.increment_version(self.shards)  # so that gathered copies are gathered again
        with torch.no_grad():
            self.plain.copy_(full)

    def _state(self) -> tuple[int, int]:
        return version_of(self.shards), self.partition.operations.updates
