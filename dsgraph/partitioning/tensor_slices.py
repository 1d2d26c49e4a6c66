"""Parameters of a tensor-parallel model, of which each rank holds a slice.

`tensor_parallel` gives a module's class one property a parameter. It returns a `dsgraph::gather_slices` of this rank's
slice, which `SliceTensors` removes from captured graphs wherever calls can work on slices. Run eagerly it is the gather
itself: a tensor-parallel model is correct wherever it runs, and saves activation memory if it is compiled.

`partition` takes such a model apart again (`take_slices`): it shards the rows of each slice, and its own property
gathers the rows, then the slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard

from dsgraph.compat.autograd import has_hooks
from dsgraph.compat.dtensor import strided_shard
from dsgraph.compat.dynamo import only_inlined
from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.ranks.model_operations import ModelOperations
from dsgraph.utils.errors import PartitionError

# In the body of a class that was made here: the slices of the parameters that its modules hold, by attribute.
_SLICES = "_dsgraph_slices"
# Also there: their mesh. A `DTensor` may return another one that is equal, with other process groups.
_MESH = "_dsgraph_mesh"


def slice_placement(held: ParameterSlice | None) -> Placement:
    """Return the slice as a placement of `DTensor`; None: of a replicated parameter."""
    if held is None or held.dim < 0:
        return Replicate()
    return Shard(held.dim) if held.parts == 1 else strided_shard(held.dim, held.parts)


def sliced_parameter(param: nn.Parameter, held: ParameterSlice, mesh: DeviceMesh) -> nn.Parameter:
    """Return the parameter of which this rank holds a slice, as a `DTensor` of the full shape."""
    full = param.detach().contiguous()
    value = DTensor.from_local(
        held.own(full, mesh.get_local_rank()),
        mesh,
        ModelOperations(mesh, (held.group,)).watched([slice_placement(held)]),
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    return _noted(nn.Parameter(value, requires_grad=param.requires_grad), param)


def _noted(made: nn.Parameter, param: nn.Parameter) -> nn.Parameter:
    made.__dict__.update(param.__dict__)  # what users and libraries note on parameters, such as `no_decay`
    return made


def slicing_class(original: type[nn.Module], slices: Mapping[str, ParameterSlice], mesh: DeviceMesh) -> type[nn.Module]:
    """Return a subclass that returns full parameters, by attribute name."""
    body: dict[str, Any] = {name: _property_for(name, held) for name, held in slices.items()}
    body |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return cast("type[nn.Module]", type(original.__name__, (original,), {**body, _SLICES: dict(slices), _MESH: mesh}))


def _property_for(name: str, held: ParameterSlice) -> property:
    def read(self: nn.Module) -> Any:
        param: Any = self._parameters[name]
        return held.full(param.to_local()) if isinstance(param, DTensor) else param

    only_inlined(read)
    return property(read, doc=f"The full parameter {name!r}; this rank's slice stands in `named_parameters()`.")


@dataclass(frozen=True)
class TakenSlices:
    """The slices of a model that was tensor-parallel.

    Attributes:
        mesh: The ranks that share its parameters; None if it was not tensor-parallel.
        by_id: id of each parameter that now is this rank's slice -> how it is sliced.
        originals: The parameters that the slices replaced.
    """

    mesh: DeviceMesh | None = None
    by_id: dict[int, ParameterSlice] = field(default_factory=dict)
    originals: list[nn.Parameter] = field(default_factory=list)


def tensor_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the ranks that share the parameters of a tensor-parallel model; None for any other model."""
    for module in model.modules():
        if _MESH in type(module).__dict__:
            mesh: DeviceMesh = type(module).__dict__[_MESH]
            return mesh
    return None


def take_slices(model: nn.Module) -> TakenSlices:
    """Make the parameters of a tensor-parallel model plain ones: this rank's slices. Modules get their own classes.

    Raises:
        PartitionError: A parameter has a gradient or hooks, which would be lost.
    """
    taken, made = TakenSlices(tensor_mesh(model)), dict[int, nn.Parameter]()
    if taken.mesh is None:
        return taken
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and (parameter.grad is not None or has_hooks(parameter)):
            raise PartitionError(
                f"parameter {name!r} has a gradient or hooks, which would be lost: call model.zero_grad() first, and "
                "register hooks after dsgraph.partition"
            )
    for module in model.modules():
        slices: Mapping[str, ParameterSlice] = type(module).__dict__.get(_SLICES, {})
        for attribute, held in slices.items():
            param: Any = module._parameters[attribute]
            if not isinstance(param, DTensor):
                continue
            if id(param) not in made:
                made[id(param)] = _own_slice(param)
                taken.originals.append(param)  # type: ignore[arg-type]
                if held.dim >= 0:
                    taken.by_id[id(made[id(param)])] = held
            module._parameters[attribute] = made[id(param)]
        if slices:
            module.__class__ = type(module).__mro__[1]
    return taken


def _own_slice(param: Any) -> nn.Parameter:
    """Return this rank's slice as a plain parameter."""
    return _noted(nn.Parameter(param.detach().to_local(), requires_grad=param.requires_grad), param)
