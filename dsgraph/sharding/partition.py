"""`partition`: a plain model becomes one whose parameters are shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate, Shard

from dsgraph.errors import PartitionError
from dsgraph.passes import AxisRole

from .agreement import Agreement
from .layout import Layout
from .mesh import axis_roles, mesh_axes, resolve_mesh, shard_dim
from .refusals import refuse_early_optimizers, refuse_hidden_references, refuse_model, refuse_parameters
from .seam import property_for
from .stages import STAGES, ZeroStage
from .table import HeldParameters, PartitionedModel, ShardedParameter

ModelT = TypeVar("ModelT", bound=nn.Module)


def partition(
    model: ModelT,
    mesh: DeviceMesh | None = None,
    *,
    stage: int = 3,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    keep_whole_below: int = 2**14,
) -> ModelT:
    """Turns the parameters of `model` into `DTensor` shards, in place; nothing else about the model changes.

    Every rank calls it with the same model; the values of the mesh's first rank count. Make the optimizer afterwards,
    from `model.parameters()`. The model works eagerly from here on; `torch.compile(model, backend="dsgraph")` makes it
    fast. Gradients are averaged over all ranks, as with DistributedDataParallel.

    Args:
        model: A module on one device, or on the `meta` device (see `materialize`).
        mesh: One dimension (all ranks share one copy of the parameters) or two (replicate x shard: hybrid sharding).
            None: one dimension over all ranks.
        stage: ZeRO stage. 0: replicated. 1, 2: shards, gathered once a step; with `accumulate`, stage 1 adds gradients
            up locally, as stage 2 does if asked to. 3: shards, gathered around each use.
        param_dtype: Dtype in which the forward sees floating-point parameters; shards keep theirs. None: the shard's.
        reduce_dtype: Dtype in which gradients are summed over ranks. None: the dtype in which the forward sees them.
        keep_whole_below: Parameters with fewer elements stay replicated. Empty and 0-dimensional ones always do.

    Returns:
        `model` itself.

    Raises:
        PartitionError: An argument, the mesh or a part of the model cannot be taken; nothing was changed.
        RanksDisagreeError: Ranks hold different models; nothing was changed.
    """
    refuse_model(model)
    _check_arguments(stage, param_dtype, reduce_dtype, keep_whole_below)
    parameters = _parameters_to_replace(model)
    mesh = resolve_mesh(mesh, model)
    arguments = f"stage={stage}, {param_dtype=}, {reduce_dtype=}, {keep_whole_below=}, mesh={tuple(mesh.shape)}"
    _agree(mesh, f"partition({arguments})", parameters)

    state = PartitionedModel(mesh=mesh, axes=mesh_axes(mesh), stage=stage)
    owners = _owners(model)
    for name, param in parameters.items():
        reason = _why_whole(param, state.zero, keep_whole_below)
        layout = _layout_for(param, state, param_dtype, reduce_dtype, whole=bool(reason))
        entry = ShardedParameter(name=name, owners=owners[param], layout=layout, whole_because=reason)
        _replace(entry, _shard(param, layout, mesh))
        state.parameters.append(entry)
    _swap_classes(model, state)
    return model


def _parameters_to_replace(model: nn.Module) -> dict[str, nn.Parameter]:
    parameters = dict(model.named_parameters())
    refuse_parameters(parameters)
    refuse_hidden_references(model)
    refuse_early_optimizers(parameters.values(), doing="partition")
    return parameters


def _agree(mesh: DeviceMesh, call: str, parameters: Mapping[str, nn.Parameter]) -> None:
    table = [f"{name}: {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in parameters.items()]
    Agreement.over(mesh).confirm("partition different models", [call, *table])


def _check_arguments(stage: object, param_dtype: object, reduce_dtype: object, keep_whole_below: object) -> None:
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in STAGES:
        raise PartitionError(f"stage is {stage!r}; ZeRO stages are 0, 1, 2 and 3")
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise PartitionError(
                f"{name} is {dtype!r}; it takes a floating-point dtype such as torch.bfloat16, or None"
            )
    if not isinstance(keep_whole_below, int) or isinstance(keep_whole_below, bool) or keep_whole_below < 0:
        raise PartitionError(f"keep_whole_below is {keep_whole_below!r}; it takes a number of elements, 0 or more")


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                owners.setdefault(param, []).append((module, attribute))
    return owners


def _why_whole(param: nn.Parameter, stage: ZeroStage, keep_whole_below: int) -> str:
    """Why every rank holds all of a parameter; empty when it is split."""
    if not stage.splits_parameters:
        return f"stage {stage.number}"
    if param.dim() == 0:
        return "0-dimensional"
    if param.numel() == 0:
        return "empty"
    if param.numel() < keep_whole_below:
        return f"below keep_whole_below={keep_whole_below}"
    return ""


def _layout_for(
    param: nn.Parameter,
    state: PartitionedModel,
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    *,
    whole: bool,
) -> Layout:
    split_over = [axis.group for axis in state.axes if axis.role is AxisRole.SHARD and not whole]
    floating = param.is_floating_point()
    return Layout(
        stage=state.stage,
        shape=tuple(param.shape),
        param_dtype=param_dtype if floating and param_dtype != param.dtype else None,
        reduce_dtype=reduce_dtype if floating else None,
        group=split_over[0] if split_over else "",
        outer_groups=tuple(axis.group for axis in state.axes if axis.group not in split_over),
    )


def placements_for(layout: Layout, mesh: DeviceMesh) -> list[Placement]:
    """Where a parameter of this layout lies on the mesh: rows split over the dimension for that, or replicated."""
    is_split = bool(layout.group)
    return [Shard(0) if is_split and role is AxisRole.SHARD else Replicate() for role in axis_roles(mesh)]


def _shard(param: nn.Parameter, layout: Layout, mesh: DeviceMesh) -> nn.Parameter:
    full = param.detach().contiguous()
    if not full.is_meta:
        broadcast_from_first(full, mesh)
    local = local_rows(full, layout, mesh)
    value = DTensor.from_local(
        local,
        mesh,
        placements_for(layout, mesh),
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=full.stride(),
    )
    shard = nn.Parameter(value, requires_grad=param.requires_grad)
    shard.__dict__.update(param.__dict__)  # what users and libraries note on parameters, such as `no_decay`
    return shard


def broadcast_from_first(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Overwrites `tensor` on every rank of the mesh with that of the first."""
    for dim in range(mesh.ndim):  # to the first rank of every row of the mesh, then along the rows
        group = mesh.get_group(dim)
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group)


def local_rows(full: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a full parameter, in memory of their own."""
    if not layout.group:
        return full.clone()
    dim = shard_dim(mesh)
    chunks, rank = full.chunk(mesh.size(dim)), mesh.get_local_rank(dim)
    return chunks[rank].clone() if rank < len(chunks) else full[:0].clone()


def _replace(entry: ShardedParameter, shard: nn.Parameter) -> None:
    for module, attribute in entry.owners:
        module._parameters[attribute] = shard


def _swap_classes(model: nn.Module, state: PartitionedModel) -> None:
    """Gives each module that holds parameters a subclass of its class with one property a parameter."""
    layouts: dict[nn.Module, dict[str, Layout]] = {}
    for entry in state.parameters:
        for module, attribute in entry.owners:
            layouts.setdefault(module, {})[attribute] = entry.layout
    classes: dict[Any, type[nn.Module]] = {}
    for module, by_name in layouts.items():
        key = (type(module), tuple(by_name.items()))
        if key not in classes:
            classes[key] = _class_for(type(module), by_name)
        object.__setattr__(module, "_dsgraph", HeldParameters(state))
        module.__class__ = classes[key]
    if "_dsgraph" not in model.__dict__:
        object.__setattr__(model, "_dsgraph", HeldParameters(state))


def _class_for(original: type[nn.Module], layouts: Mapping[str, Layout]) -> type[nn.Module]:
    body: dict[str, Any] = {name: property_for(name, layout) for name, layout in layouts.items()}
    body |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    if issubclass(original, nn.RNNBase):
        body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    return cast("type[nn.Module]", type(original.__name__, (original,), body))


def _flat_weights(self: Any) -> list[Any]:
    """RNNs run on a flat list that their constructor fills; this one is read from the attributes at each use."""
    return [getattr(self, name, None) for name in self._flat_weights_names]
