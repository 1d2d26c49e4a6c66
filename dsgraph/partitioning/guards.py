"""Checks of a partitioned model and its optimizers, and what lets optimizers of bitsandbytes step on shards.

An optimizer, or DistributedDataParallel around the model, is not known when the model is partitioned. Torch's public
hooks report both in time: an optimizer before its step, and DistributedDataParallel when it wraps the model, before its
first collective.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dsgraph.compat.dtensor import LERPS_LISTS_OF_SHARDS, distributed_like
from dsgraph.inductor_ext import resolve_group
from dsgraph.partitioning.eager.full_parameter import keep_shard
from dsgraph.partitioning.eager.replaced_data import refuse_replaced_data
from dsgraph.partitioning.state_dict.saved_rows import mark_rows
from dsgraph.utils.errors import PartitionError

from .additions import is_plain
from .parameter import ParameterState, not_taken_in
from .replicated import confirm_replicated, holds_any, note_replicated
from .rows import BLOCK, own_part, scales_like, split_dims
from .state import PartitionState, partition_states

# These compute with a complete matrix or gradient. On shards torch raises an error, or gives other numbers (Muon).
NEED_ALL_ROWS = (optim.Adafactor, optim.Muon, optim.Rprop)
# State that torch's optimizers store as a plain number for a parameter of any shape.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
# Options for steps on many parameters at once that torch does not support for shards.
_UNKNOWN_ON_SHARDS = (
    *((optim.Adagrad, "fused"), (optim.SGD, "fused"), (optim.Rprop, "foreach")),
    *([] if LERPS_LISTS_OF_SHARDS else [(optim.Adafactor, "foreach")]),
)


def guard(state: PartitionState) -> None:
    """Register the checks of a partitioned model for its lifetime."""
    weak_state = weakref.ref(state)
    checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @torch.compiler.disable  # for scripts that compile the step itself
    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = weak_state()
        if living is None:
            return
        refuse_added_parameters(optimizer, living)
        if not holds_any(optimizer, living):
            return
        for entry in living.parameters:
            if torch.is_tensor(entry.param) and not isinstance(entry.param, DTensor):
                raise PartitionError(not_taken_in(entry.name))
            refuse_replaced_data(entry.param, entry.name)
        if optimizer not in checked:
            refuse_optimizer(optimizer, living)
            if hasattr(optimizer, "name2qmap"):
                _step_on_rows(optimizer)
            _watch_states(optimizer, weak_state)
        _complete_scalar_states(optimizer, living)
        living.before_update(optimizer)  # first: ranks that ran the last backward have already reduced
        living.operations.agree(f"steps {type(optimizer).__name__}")  # before an update from local gradients
        confirm_replicated(living, is_first=optimizer not in checked)
        checked.add(optimizer)

    @torch.compiler.disable
    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = weak_state()
        if living is not None and holds_any(optimizer, living):
            living.note_step(optimizer)
            note_replicated(living)

    ended = _hooks_of_ended_models()
    while ended:
        ended.popleft().remove()
    for handle in (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)):
        weakref.finalize(state, ended.append, handle)
    _watch_registrations()


@cache
def _hooks_of_ended_models() -> deque[RemovableHandle]:
    """Return the hooks of models that were collected, which the next partition removes.

    A model may be collected while torch iterates over its hooks, and torch does not expect that one is removed then.
    """
    return deque()


@cache
def _watch_registrations() -> None:
    """Watch what is added to modules, from the first partitioned model to the end of the process.

    The hooks are never removed: Dynamo guards on such hooks, and removing one while a model is compiled is an error.
    """
    modules.register_module_module_registration_hook(_refuse_averaging_twice)
    modules.register_module_parameter_registration_hook(keep_shard)


def refuse_optimizer(optimizer: Optimizer, state: PartitionState) -> None:
    """Refuse an optimizer that contains parameters of a model and cannot step on them as in one process.

    Raises:
        PartitionError: The optimizer is not supported; the message names it, a parameter and what to do.
    """
    entries = {id(entry.param): entry for entry in state.parameters}
    for group in optimizer.param_groups:
        held = [entries[id(param)] for param in group["params"] if id(param) in entries]
        if held and (problem := _problem(optimizer, group, held, state)):
            raise PartitionError(f"{type(optimizer).__name__}: {problem}; nothing was updated")


def refuse_added_parameters(optimizer: Optimizer, state: PartitionState) -> None:
    """Refuse a step on parameters of a model that are not partitioned, because their gradients are not averaged.

    Raises:
        PartitionError: There is such a parameter; the message names the first one.
    """
    plain = {id(param) for group in optimizer.param_groups for param in group["params"] if is_plain(param)}
    plain -= {id(module._parameters[attribute]) for module, attribute in state.ignored}
    for name, param in state.root.named_parameters() if plain else ():
        if id(param) in plain:
            raise PartitionError(not_taken_in(name))


def needs_all_rows(optimizer: Optimizer) -> bool:
    """Return True if an update needs all rows of a parameter, or state that is not split like its rows."""
    is_of_layers = getattr(getattr(optimizer, "args", None), "max_unorm", 0) > 0  # LAMB and LARS of bitsandbytes
    is_known = isinstance(optimizer, NEED_ALL_ROWS) or getattr(optimizer, "needs_full_matrices", False)
    return is_known or is_of_layers or getattr(optimizer, "optimizer_name", "") == "ademamix"


def _step_on_rows(optimizer: Any) -> None:
    """Let an optimizer of bitsandbytes, whose kernels take plain tensors, update this rank's rows of each shard."""
    for name in ("init_state", "update_step"):
        setattr(optimizer, name, partial(_on_rows, optimizer, getattr(optimizer, name)))
    for module, attribute, config in optimizer.mng.module_weight_config_triple:  # it would look for the full parameter
        optimizer.mng.pid2config[id(module._parameters.get(attribute))] = config


def _on_rows(optimizer: Any, method: Callable[..., None], group: Any, param: Any, *indices: int) -> None:
    """Call a method of an optimizer with the rows of a parameter, whose state is split like it."""
    state, part, is_split = optimizer.state[param], own_part(param), bool(split_dims(param))
    rows, own = part.detach(), {key: own_part(value) for key, value in state.items()}
    own |= {key: own[key].view(-1)[: math.ceil(part.numel() / BLOCK)] for key in own if is_split and key[:3] == "abs"}
    if state:
        more = own["state1"].dim() - rows.dim()  # 1 for AdEMAMix: two momenta
        if own["state1"].shape[more:] != rows.shape or ("absmax1" in own and own["absmax1"].dim() != 1 + more):
            raise PartitionError(f"{type(optimizer).__name__}: state of another stage or world size: load only weights")
        rows.grad = own_part(param.grad)
    else:
        rows.numel = param.numel  # type: ignore[method-assign]  # by which all ranks choose 8 or 32 bits alike
    optimizer.state[rows] = own
    method(group, rows, *indices)
    if rows.data_ptr() != part.data_ptr():  # it was not contiguous
        part.copy_(rows)
    for key, value in optimizer.state.pop(rows).items():
        if key not in state and is_split and key.startswith(("state", "absmax")):
            state[key] = distributed_like(param, value) if key[0] == "s" else scales_like(param, value.dtype)
        elif key not in state or not isinstance(value, Tensor):
            state[key] = value


def _watch_states(optimizer: Optimizer, weak_state: weakref.ref[PartitionState]) -> None:
    """Prevent a single rank from pickling only its rows of an optimizer's state, and two optimizers from sharing it.

    Loaded state may share the memory of the optimizer that it was read from: torch copies only what is sharded.
    """

    def mark(_: Optimizer, state_dict: dict[str, Any]) -> None:
        living = weak_state()
        if living is not None:
            mark_rows((value for own in state_dict["state"].values() for value in own.values()), living)

    def copy_replicated(loaded: Optimizer) -> None:
        for own in loaded.state.values():
            for key, value in own.items():
                if isinstance(value, Tensor) and not any(p.is_shard() for p in getattr(value, "placements", ())):
                    own[key] = value.clone()

    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_post_hook(copy_replicated)


def _complete_scalar_states(optimizer: Optimizer, state: PartitionState) -> None:
    """Turn loaded state of 0-dimensional parameters back into `DTensor`s.

    Torch treats each 0-dimensional tensor as a number, which it loads as a plain tensor
    (`set_optimizer_state_dict`, `torch.distributed.checkpoint`), and cannot compute with it and a `DTensor`.
    """
    for entry in state.parameters:
        if entry.spec.shape or entry.param not in optimizer.state:
            continue
        own = optimizer.state[entry.param]
        for key in [key for key, value in own.items() if _is_plain_scalar(value) and key not in _NUMBERS]:
            larger = [item.get(key) for param, item in optimizer.state.items() if param.dim()]
            if not any(map(_is_plain_scalar, larger)):  # otherwise it is a plain number of the optimizer
                own[key] = distributed_like(entry.param.detach(), own[key])  # type: ignore[arg-type]


def _is_plain_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() == 0


def _problem(
    optimizer: Optimizer, group: Mapping[str, Any], held: Sequence[ParameterState], state: PartitionState
) -> str | None:
    """Return why an optimizer cannot step on parameters of one of its groups, and what to do; None if it can."""
    name, tier = held[0].name, state.arguments.offload.optimizer
    if tier and getattr(optimizer, "tier", None) != tier:
        return (
            f"it would keep the state of {name!r} on the device, but the model was partitioned with "
            f'offload={{"optimizer": "{tier}"}}: use dsgraph.offload_optimizer(optimizer, model) instead'
        )
    needs_all = needs_all_rows(optimizer)
    sliced = next((entry for entry in held if entry.spec.held or getattr(entry.param.grad, "is_slice", False)), None)
    if needs_all and sliced is not None:
        return (
            f"it needs full matrices, and contains {sliced.name!r}, of which each tensor-parallel rank has a slice: "
            "use an element-wise optimizer, such as AdamW, or a model without tensor parallelism"
        )
    if needs_all and state.zero.splits_parameters:
        return (
            f"it needs all rows of a parameter at once, and contains {name!r} of a model that was partitioned with "
            f"stage={state.zero.number}, which splits rows over the ranks: use another optimizer, such as AdamW, "
            "partition with stage=0, or use dsgraph.initialize, which supports it"
        )
    foreach = group.get("foreach")
    by_lists = group.get("fused") or (held[0].param.device.type != "cpu" if foreach is None else foreach)
    if by_lists and any(hasattr(param, "dsgraph_own") for param in group["params"]):
        return (
            f"torch steps on all parameters of a group at once, and this one has {name!r} and some of ignored_params, "
            "which are plain tensors: give those a group of their own, or pass foreach=False"
        )
    for kind, option in _UNKNOWN_ON_SHARDS:
        if isinstance(optimizer, kind) and group.get(option):
            return (
                f"torch has no step with {option}=True for the parameters of a partitioned model, such as {name!r}: "
                f"leave {option}=True out"
            )
    if isinstance(optimizer, optim.LBFGS) and any(hasattr(entry.param.grad, "dsgraph_no_norm") for entry in held):
        return f"it computes with full gradients, and this rank has a part of them, such as {name!r}: use AdamW"
    if isinstance(optimizer, optim.LBFGS) or type(optimizer).__module__.startswith("torchao.optim"):
        split = [entry for entry in held if entry.spec.group]
        uneven = next((each for each in split if each.spec.shape[0] % resolve_group(each.spec.group).size()), None)
        if uneven is not None:
            return (
                f"torch does not support its step on {uneven.name!r}, whose {uneven.spec.shape[0]} "
                "rows do not divide by the number of ranks: use another optimizer, or partition with stage=0"
            )
    return None


def _refuse_averaging_twice(parent: nn.Module, name: str, model: nn.Module | None) -> None:
    if model is None or not isinstance(parent, DistributedDataParallel) or not partition_states(model):
        return
    raise PartitionError(
        f"DistributedDataParallel was given {type(model).__name__}, which dsgraph.partition has partitioned: its "
        "gradients are averaged over the ranks already. Use the model without DistributedDataParallel. Replace "
        "transformers.Trainer by DsgraphTrainer and Accelerator by DsgraphAccelerator, and give them the plain model. "
        "Lightning's strategy 'ddp' has no replacement. See docs/guides/frameworks.md"
    )
