"""Parameters of a tensor-parallel model, of which each rank holds a slice.

`tensor_parallel` gives a module's class one property a parameter. It returns a `dsgraph::gather_slices` of this rank's
slice, which `SliceTensors` removes from captured graphs wherever calls can work on slices. Run eagerly it is the gather
itself: a tensor-parallel model is correct wherever it runs, and saves activation memory if it is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard

from dsgraph.compat.dtensor import strided_shard
from dsgraph.compat.dynamo import only_inlined
from dsgraph.inductor_ext import slice_of


@dataclass(frozen=True)
class ParameterSlice:
    """How a parameter is sliced over the ranks of a tensor-parallel axis.

    Attributes:
        dim: The sharded dimension; -1: none, the parameter is replicated.
        parts: Number of equal pieces that this dimension consists of; each of them is sharded.
        ranks: Number of ranks that share it.
        group: Name of their process group.
    """

    dim: int
    parts: int
    ranks: int
    group: str

    def placement(self) -> Placement:
        """Return the slice as a placement of `DTensor`."""
        if self.dim < 0:
            return Replicate()
        return Shard(self.dim) if self.parts == 1 else strided_shard(self.dim, self.parts)

    def own(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's slice of the full parameter, in memory of its own."""
        if self.dim < 0:
            return full.clone()
        return slice_of(full, self.dim, parts=self.parts, ranks=self.ranks, rank=rank)

    def full(self, own: Tensor) -> Tensor:
        """Return the full parameter: a marker in captured graphs, a gather elsewhere."""
        if self.dim < 0:
            return own
        return cast("Tensor", torch.ops.dsgraph.gather_slices(own, self.dim, self.parts, self.ranks, self.group))


def sliced_parameter(param: nn.Parameter, held: ParameterSlice, mesh: DeviceMesh) -> nn.Parameter:
    """Return the parameter of which this rank holds a slice, as a `DTensor` of the full shape."""
    full = param.detach().contiguous()
    value = DTensor.from_local(
        held.own(full, mesh.get_local_rank()),
        mesh,
        [held.placement()],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    made = nn.Parameter(value, requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)  # what users and libraries note on parameters, such as `no_decay`
    return made


def slicing_class(original: type[nn.Module], slices: Mapping[str, ParameterSlice]) -> type[nn.Module]:
    """Return a subclass that returns full parameters, by attribute name."""
    body: dict[str, Any] = {name: _property_for(name, held) for name, held in slices.items()}
    body |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return cast("type[nn.Module]", type(original.__name__, (original,), body))


def _property_for(name: str, held: ParameterSlice) -> property:
    def read(self: nn.Module) -> Any:
        param: Any = self._parameters[name]
        return held.full(param.to_local()) if isinstance(param, DTensor) else param

    only_inlined(read)
    return property(read, doc=f"The full parameter {name!r}; this rank's slice stands in `named_parameters()`.")
