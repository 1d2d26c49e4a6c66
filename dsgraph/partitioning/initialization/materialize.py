"""`materialize`: a model that was built on the meta device gets memory and values, one module at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh

from dsgraph.compat.tensors import keep_hooks
from dsgraph.offload.stored_tensor import room
from dsgraph.partitioning.classes import plain_class
from dsgraph.partitioning.parameter import ParameterState
from dsgraph.partitioning.refusals import refuse_early_optimizers
from dsgraph.partitioning.rows import broadcast_from_first, rows_in
from dsgraph.partitioning.state import PartitionState, partition_states
from dsgraph.partitioning.transforms.offloaded import refuse_device
from dsgraph.utils.errors import PartitionError

from .buffers import equalise_buffers
from .weight_folder import weight_initialisers

ModelT = TypeVar("ModelT", bound=nn.Module)
Init = Callable[[nn.Module], object] | Literal["empty"] | None


def materialize(
    model: ModelT,
    device: torch.device | str | None = None,
    *,
    init: Init = None,
    weights: str | PathLike[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> ModelT:
    """Allocate the shards of a partitioned model on the `meta` device, and initialise them.

    Modules are initialised in order. Each has all its parameters at full size while it is initialised; then only this
    rank's rows are kept. So no rank ever holds the full model. All ranks draw the random numbers of the mesh's first
    rank, so that the values are those of the same initialisation in one process. A tied parameter gets the values of
    the first module that holds it.

        with torch.device("meta"):
            model = Model()
        dsgraph.partition(model, mesh)
        torch.manual_seed(0)
        dsgraph.materialize(model, "cpu")

    Args:
        model: A model that was built under `torch.device("meta")` and then partitioned.
        device: The device of its shards and buffers. None: the device type of its mesh.
        init: Called with each module that holds parameters or buffers of its own, while these have their full size; it
            initialises them in place. None: the model's `_init_weights(module)` if it has one (transformers), else the
            module's `reset_parameters()`. "empty": leave memory uninitialised, for a checkpoint to be loaded.
        weights: A folder of `*.safetensors` with the names of the model's `state_dict`, such as transformers' own.
            Values come from there, and `init` sets buffers that no checkpoint contains. One of several tied parameters
            is enough. Each rank reads each full parameter, and keeps its rows.
        progress: Called after each module with the number of parameters that are done, and with that of the whole
            model.

    Returns:
        `model` itself.

    Raises:
        PartitionError: The model is not partitioned or not on the meta device, a module has parameters and no known way
            to initialise them, or `weights` lacks one; nothing was changed.
    """
    states = partition_states(model)
    if not states:
        raise PartitionError("materialize: the model is not partitioned; call dsgraph.partition(model, ...) first")
    on_meta = [entry for state in states for entry in state.parameters if entry.param.is_meta]
    buffers = [
        module for module in model.modules() if any(b is not None and b.is_meta for b in module._buffers.values())
    ]
    if not on_meta and not buffers:
        raise PartitionError("materialize: nothing in the model is on the meta device")
    target = torch.device(states[0].mesh.device_type if device is None else device)
    refuse_device(f"materialize: the model is to be on {target.type}", target, states[0].arguments.offload)
    refuse_early_optimizers([entry.param for entry in on_meta], doing="materialize")  # type: ignore[misc]
    waiting = {id(entry.param) for entry in on_meta}
    initialised = [module for module in model.modules() if module in buffers or _holds(module, waiting)]
    find = partial(_initialiser, model, init=init)
    if weights is None:
        initialisers = {module: find(module) for module in initialised}
    else:
        initialisers = weight_initialisers(model, Path(weights), states[0], find)

    entries = {id(entry.param): (entry, state) for state in states for entry in state.parameters}
    count = sum(entry.param.numel() for entry in on_meta)
    with _same_random_numbers(states[0].parameter_mesh, target):
        for module in initialised:
            _materialize_module(module, entries, target, initialisers[module])
            if progress is not None:
                progress(count - sum(entry.param.numel() for entry in on_meta if entry.param.is_meta), count)
    for state in states if init != "empty" else ():
        equalise_buffers(state.root, state)
    return model


@contextmanager
def _same_random_numbers(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    """Let all ranks draw what the mesh's first rank draws; a rank with another seed gets its own state back."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # until then there are no generators
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    own = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, own, strict=True):
        shared = state.to(mesh.device_type)
        broadcast_from_first(shared, mesh)
        generator.set_state(shared.cpu())
    used = [generator.get_state() for generator in generators]
    yield
    for generator, before, shared in zip(generators, own, used, strict=True):
        if not torch.equal(before, shared):
            generator.set_state(before)


def _holds(module: nn.Module, params: set[int]) -> bool:
    return any(id(param) in params for param in module._parameters.values() if param is not None)


def _initialiser(model: nn.Module, module: nn.Module, *, init: Init) -> Callable[[nn.Module], object]:
    if init == "empty":
        lost = sorted(name for name in module._non_persistent_buffers_set if module._buffers[name] is not None)
        if lost:
            raise PartitionError(
                f"buffer {lost[0]!r} of {type(module).__name__} is not part of checkpoints, so that nothing would fill "
                "it: pass init=... with a function that does"
            )
        return lambda _: None
    if callable(init):
        return init
    if init is not None:
        raise PartitionError(f'materialize: init is {init!r}; it takes a function of a module, "empty" or None')
    if hasattr(model, "_init_weights"):  # transformers
        return model._init_weights  # type: ignore[return-value]
    if hasattr(module, "reset_parameters"):
        return lambda held: held.reset_parameters()  # type: ignore[operator]
    name = next(name for name, candidate in model.named_modules() if candidate is module)
    held = [*module._parameters, *module._buffers]
    raise PartitionError(
        f"module {name!r} ({type(module).__name__}) holds {', '.join(held)} and has no reset_parameters: "
        'define it, pass init=..., or pass init="empty" and load a checkpoint'
    )


def _materialize_module(
    module: nn.Module,
    entries: dict[int, tuple[ParameterState, PartitionState]],
    device: torch.device,
    initialise: Callable[[nn.Module], object],
) -> None:
    sharded = {name: param for name, param in module._parameters.items() if param is not None}
    partitioned_class = type(module)
    module.__class__ = plain_class(module)
    try:
        for name, param in sharded.items():
            full = _memory_for(param, entries, device)
            module._parameters[name] = nn.Parameter(full, requires_grad=param.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        with torch.no_grad():
            initialise(module)
        full_values = {name: module._parameters[name] for name in sharded}
    finally:
        module._parameters.update(sharded)
        module.__class__ = partitioned_class
    for name, param in sharded.items():
        value = full_values.pop(name)
        assert value is not None
        if param.is_meta:  # else it is tied to a module that came earlier, whose values stand
            _keep_rows(*entries[id(param)], value.detach())


def _memory_for(
    param: Tensor, entries: dict[int, tuple[ParameterState, PartitionState]], device: torch.device
) -> Tensor:
    """Return memory of a parameter's full size; for one that goes to disk it is freed at once."""
    known = entries.get(id(param))  # one that is tied to an earlier module's is there already
    if known is not None and known[0].tier == "disk" and device.type == "cpu":
        return room(param.shape, param.dtype)
    return torch.empty(param.shape, dtype=param.dtype, device=device)


def _keep_rows(entry: ParameterState, state: PartitionState, full: Tensor) -> None:
    meta = entry.param
    rows = rows_in(full, entry.spec, state.mesh)
    if not entry.tier:
        rows = rows.clone()
    for transform in entry.transforms:
        rows = transform.store(rows)
    local = state.distributed(rows, entry.spec, shape=meta.shape, stride=meta.stride())
    shard = nn.Parameter(local, requires_grad=meta.requires_grad)
    shard.__dict__.update(meta.__dict__)
    torch.utils.swap_tensors(meta, shard)  # the parameter stays the same object, which users may hold
    keep_hooks(meta)
    for transform in entry.transforms:
        transform.attach(meta)
    state.keep_copy(entry)
