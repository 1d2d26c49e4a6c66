"""`partition`: turn the parameters of a plain model into shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.compat.modules import dtypes_after
from dsgraph.passes import AxisRole, ParameterSpec
from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.ranks.agreement import Agreement
from dsgraph.ranks.eager_agreement import VARIABLE, patience_of
from dsgraph.ranks.mesh import mesh_axes, resolve_mesh
from dsgraph.utils.errors import PartitionError

from .additions import Additions, Place, find_additions, find_ignored, mark_gradients, part_to_extend
from .arguments import KEEP_WHOLE_BELOW, PartitionArguments, check_arguments, check_cast
from .blocks.block_frames import block_methods, define_blocks
from .blocks.repeated_blocks import find_blocks, read_blocks
from .classes import plain_class, swap_classes
from .eager.replaced_data import forget_memory, refuse_replaced_data
from .forward_inputs import cast_inputs_of
from .guards import guard
from .initialization.buffers import describe_buffer, equalise_buffers, new_buffers
from .parameter import ParameterState
from .refusals import refuse_early_optimizers, refuse_hidden_references, refuse_model, refuse_parameters
from .replicated import warn_of_own_values
from .restore import restored_on_error
from .rows import broadcast_from_first, local_rows, own_row_count
from .stages import STAGES
from .state import PartitionState, partition_states
from .state_dict.pretrained import methods_for
from .tensor_slices import take_slices, tensor_mesh
from .transforms.offloaded import give_places, read_offload, refuse_other_devices
from .transforms.quantized_weight import keep_quantized

ModelT = TypeVar("ModelT", bound=nn.Module)

_DEFAULTS = PartitionArguments(stage=3, param_dtype=None, reduce_dtype=None, keep_whole_below=KEEP_WHOLE_BELOW)


def partition(
    model: ModelT,
    mesh: DeviceMesh | None = None,
    *,
    stage: int | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    keep_whole_below: int | None = None,
    blocks: Literal["auto", "none"] | Sequence[str] | None = None,
    offload: Mapping[str, Any] | None = None,
    cast_forward_inputs: bool | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> ModelT:
    """Turn the parameters of `model` into `DTensor` shards, in place; nothing else about the model changes.

    Every rank calls it with the same model; parameters and buffers get the values of the mesh's first rank. Create the
    optimizer afterwards, from `model.parameters()`. From now on the model works eagerly; `torch.compile(model,
    backend="dsgraph")` makes it fast. Gradients are averaged over all ranks, as with DistributedDataParallel.

    Call it again after adding something to the model: a head, an adapter, `layer.weight = nn.Parameter(...)`. It
    partitions the new parameters like the first call did, and leaves the others unchanged. The arguments may be omitted
    then.

    Args:
        model: A module on one device, or on the `meta` device (see `materialize`).
        mesh: A device mesh with one dimension (parameters are sharded over all ranks) or two (replicate x shard: hybrid
            sharding). None: one dimension over all ranks.
        stage: ZeRO stage; None: 3. 0: replicated. 1, 2: shards, gathered once a step; with `accumulate`, stage 1 adds
            gradients up locally, and so does stage 2 with `reduce_once=True`. 3: shards, gathered around each use.
        param_dtype: Dtype in which the forward sees floating-point parameters; shards keep theirs. None: the shard's.
            A parameter that `model.to(param_dtype)` leaves in float32, because a class overrides `_apply`, stays so.
        reduce_dtype: Dtype in which gradients are summed over ranks. None: the dtype in which the forward sees them.
        keep_whole_below: Parameters with fewer elements stay replicated; None: 16384. Empty and 0-dimensional ones
            always do.
        blocks: The repeated blocks that are compiled once, each as a frame of its own: "auto" selects the blocks of
            lists that have equal classes and parameters, if most of the model is inside them; "none" none; a list names
            lists of modules, such as ["model.layers"]. Stage 3 gathers the next block while one computes. With
            `fullgraph=True` and some options the whole model is one graph all the same, see docs/concepts/index.md.
            None: "auto" at stage 3 without parameters on disk, otherwise "none".
        offload: Tensors to store elsewhere than on the model's device: {"optimizer": "host", "parameters": "disk",
            "folder": "/scratch", "ratio": 0.5}. "optimizer", at every stage: "host" or "disk", the place of the
            optimizer's state; wrap the optimizer with `dsgraph.offload_optimizer`. "parameters", at stage 3: "host" or
            "disk", the place of this rank's rows of sharded parameters and of their gradients; compiled graphs read
            each from disk before its use. For a model on the CPU, "host" changes nothing. "folder": a folder on the
            disk; default: that for temporary files. Its files are deleted when the process ends. "ratio": the share of
            bytes, above 0 and up to 1, or one for each; the last parameters stay on the device. See
            docs/guides/larger-than-memory.md. None: no offload.
        cast_forward_inputs: True casts floating-point inputs of `model`, also inside lists and dicts, to `param_dtype`,
            as FSDP2's `MixedPrecisionPolicy` does. None: True with a `param_dtype`.
        ignored_params: Parameters that stay each rank's own, such as experts that the model itself spreads over ranks:
            plain tensors with their own values and gradients, which nothing averages. Torch's `clip_grad_norm_` counts
            those of all ranks. On GPUs they need a parameter group of their own.

    Returns:
        `model` itself.

    Raises:
        PartitionError: An argument, the mesh or a part of the model is not supported; nothing was changed.
        RanksDisagreeError: Ranks hold different models; nothing was changed.
    """
    refuse_model(model)
    check_arguments(stage, param_dtype, reduce_dtype, keep_whole_below)
    check_cast(cast_forward_inputs, param_dtype)
    arguments = {
        "stage": stage,
        "param_dtype": param_dtype,
        "reduce_dtype": reduce_dtype,
        "keep_whole_below": keep_whole_below,
        "blocks": None if blocks is None else read_blocks(blocks),
        "offload": None if offload is None else read_offload(offload, stage),
        "cast_forward_inputs": cast_forward_inputs,
    }
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    parts, ignored = partition_states(model), find_ignored(model, ignored_params)
    if parts:
        _take_in(model, part_to_extend(model, parts, given, mesh), ignored)
    else:
        _begin(model, mesh, {"blocks": _default_blocks(given), **given}, ignored)
    mark_gradients(ignored)
    return model


def _default_blocks(given: Mapping[str, Any]) -> str:
    """Return the blocks at stage 3; reading ahead from disk does not go beyond a graph, so that needs one."""
    gathers = STAGES[given.get("stage", _DEFAULTS.stage)].gathers_each_use
    return "auto" if gathers and not ("offload" in given and given["offload"].parameters) else "none"


def _begin(model: nn.Module, mesh: DeviceMesh | None, given: Mapping[str, Any], ignored: set[Place]) -> None:
    """Partition a plain model."""
    if tensor_mesh(model) is not None and mesh is None:
        raise PartitionError(
            "partition: the model is tensor-parallel: pass mesh=, the ranks that hold the same slices, such as "
            "mesh['dp']"
        )
    with restored_on_error(model):
        taken = take_slices(model)
        refuse_early_optimizers(taken.originals, doing="partition")
        left_out = {id(module._parameters[attribute]) for module, attribute in ignored}
        taken_in = {name: param for name, param in model.named_parameters() if id(param) not in left_out}
        additions = Additions(model, taken_in, [], [], taken.by_id)
        if "offload" in given:
            refuse_other_devices(additions.parameters, given["offload"])
        _refuse(additions)
        mesh = resolve_mesh(mesh, model)
        arguments = replace(_DEFAULTS, **given)
        part = PartitionState(mesh, mesh_axes(mesh), arguments, model, guard, tensor_mesh=taken.mesh, ignored=ignored)
        entries = _apply(additions, part)
        part.operations.number_among_models()
        _add(entries, part)
    guard(part)


def _take_in(model: nn.Module, part: PartitionState | None = None, ignored: Iterable[Place] = ()) -> None:
    """Partition the new parameters of a partitioned model."""
    if part is None:
        (part,) = partition_states(model)
    part.ignored.update(ignored)
    additions = find_additions(model, part)
    _refuse(additions)
    resolve_mesh(part.mesh, additions.root)
    with restored_on_error(additions.root):
        _add(_apply(additions, part), part)


def _refuse(additions: Additions) -> None:
    refuse_parameters(additions.parameters)
    refuse_hidden_references(additions.root, additions.parameters)
    refuse_early_optimizers(additions.parameters.values(), doing="partition")


def _apply(additions: Additions, part: PartitionState) -> list[ParameterState]:
    """Partition what differs between a model and its state. Before anything is changed, the ranks agree on it.

    Returns:
        The new parameters, which are to be added to the state.
    """
    model = additions.root
    blocks = find_blocks(model, part.arguments.blocks)
    table = [
        f"{name}: {list(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in additions.parameters.items()
    ]
    changed = f"{len(additions.tied)} tied, {len(additions.gone)} gone"
    buffers = [describe_buffer(name, buffer) for name, *_, buffer in new_buffers(model)]
    call = f"partition({part.arguments}, mesh={tuple(part.mesh.shape)}), {VARIABLE}={patience_of():g}, {changed}"
    Agreement.over(part.parameter_mesh).confirm("partition different models", [call, *table, *buffers])

    warn_of_own_values(additions.parameters, part.mesh)
    part.root = model
    for entry, (module, attribute) in additions.gone:
        part.forget(entry, module, attribute)
    for entry, place in additions.tied:
        entry.owners.append(place)
    owners, entries, cast = _owners(model), [], part.arguments.param_dtype
    kept = dtypes_after(model, cast) if cast is not None else {}
    for name, param in additions.parameters.items():
        held = additions.slices.get(id(param))
        reason = _why_replicated(param, part, held)
        spec = _spec_for(name, param, part, held, whole=bool(reason), seen=kept.get(id(param), cast))
        entries.append(ParameterState(spec, owners[param], part.zero, reason))
        keep_quantized(entries[-1], param)
    give_places(entries, part)
    for entry, param in zip(entries, additions.parameters.values(), strict=True):
        shard = _shard(param, entry, part)
        for module, attribute in entry.owners:
            module._parameters[attribute] = shard
    equalise_buffers(model, part)
    swap_classes(model, part, [*part.parameters, *entries], partial(_methods, blocks=blocks, root=model))
    if part.arguments.param_dtype is not None and part.arguments.cast_forward_inputs:
        cast_inputs_of(model, part.arguments.param_dtype)
    return entries


def _add(entries: Iterable[ParameterState], part: PartitionState) -> None:
    for entry in entries:
        part.add(entry)
    define_blocks(part.root, part)


def _methods(module: nn.Module, *, blocks: frozenset[nn.Module], root: nn.Module) -> Mapping[str, Any]:
    """Return the overrides of a partitioned module."""
    own = block_methods(module, blocks, is_root=module is root)
    return {**methods_for(plain_class(module), take_in=_take_in), **own}


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                owners.setdefault(param, []).append((module, attribute))
    return owners


def _why_replicated(param: nn.Parameter, part: PartitionState, held: ParameterSlice | None) -> str:
    """Return why a parameter is replicated; empty if it is sharded."""
    keep_whole_below = part.arguments.keep_whole_below
    if not part.zero.splits_parameters:
        return f"stage {part.zero.number}"
    if param.dim() == 0:
        return "0-dimensional"
    if param.numel() == 0:
        return "empty"
    if param.numel() < keep_whole_below:
        return f"below keep_whole_below={keep_whole_below}"
    if held is not None and held.dim == 0 and held.parts > 1 and part.mesh.size() > 1:
        return f"fused of {held.parts} tensor-parallel parts, whose rows no DTensor placement can shard further"
    return ""


def _spec_for(
    name: str, param: Tensor, part: PartitionState, held: ParameterSlice | None, whole: bool, seen: torch.dtype | None
) -> ParameterSpec:
    split_over = [axis.group for axis in part.axes if axis.role is AxisRole.SHARD and not whole]
    floating, arguments = param.is_floating_point(), part.arguments
    shape = tuple(param.shape)
    return ParameterSpec(
        name,
        shape,
        shape if whole else (own_row_count(param, part.mesh), *shape[1:]),
        param.dtype,
        split_over[0] if split_over else "",
        param.requires_grad,
        param_dtype=seen if floating and seen != param.dtype else None,
        reduce_dtype=arguments.reduce_dtype if floating else None,
        outer_groups=tuple(axis.group for axis in part.axes if axis.group not in split_over),
        held=held,
    )


def _shard(param: nn.Parameter, entry: ParameterState, part: PartitionState) -> nn.Parameter:
    full, spec, mesh = param.detach().contiguous(), entry.spec, part.mesh
    if not full.is_meta:
        # Keep the user's values, in case a later parameter fails.
        if part.parameter_mesh.size() > 1 or full.is_inference():
            full = full.clone()
        broadcast_from_first(full, mesh if spec.held is not None else part.parameter_mesh)
    local = local_rows(full, spec, mesh)
    transforms = () if full.is_meta else entry.transforms
    for transform in transforms:
        local = transform.store(local)
    shape = torch.Size(spec.full_shape)
    value = part.distributed(local, spec, shape=shape, stride=torch.empty(shape, device="meta").stride())
    shard = nn.Parameter(value, requires_grad=param.requires_grad)
    shard.__dict__.update(param.__dict__)  # what users and libraries note on parameters, such as `no_decay`
    shard.__dict__.pop("CB", None)  # the full weight, on one of bitsandbytes
    forget_memory(shard)
    for transform in transforms:
        transform.attach(shard)  # type: ignore[arg-type]
    refuse_replaced_data(shard, "")
    return shard
