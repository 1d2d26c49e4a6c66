"""What a partitioned model refuses of those who use it: optimizers that cannot step on shards, and a second averaging.

Neither can be seen when the model is partitioned. Torch's public hooks tell of both in time: an optimizer ahead of its
step, and DistributedDataParallel when it takes the model in, ahead of its first collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dsgraph import compat
from dsgraph.errors import PartitionError
from dsgraph.inductor_ext import resolve_group
from dsgraph.sharding.replaced_data import refuse_replaced_data
from dsgraph.sharding.saved_rows import mark_rows
from dsgraph.sharding.table import PartitionedModel, ShardedParameter, is_plain, not_taken_in, partitioned_parts

from .replicated import confirm_replicated, holds_any, note_replicated

# They compute with a matrix or a gradient as a whole. Torch raises on shards, or gives other numbers (Muon).
NEED_ALL_ROWS = (optim.Adafactor, optim.Muon, optim.Rprop)
# State that torch's optimizers keep as a plain number for a parameter of any shape.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
# Ways to step on many parameters at once that torch does not have for shards.
_UNKNOWN_ON_SHARDS = ((optim.Adagrad, "fused"), (optim.SGD, "fused"), (optim.Rprop, "foreach"))


def guard(state: PartitionedModel) -> None:
    """Refuses, for as long as a partitioned model lives, what cannot be right with it."""
    weak_state = weakref.ref(state)
    checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @torch.compiler.disable  # where the step itself is compiled
    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = weak_state()
        if living is None:
            return
        refuse_added_parameters(optimizer, living)
        if not holds_any(optimizer, living):
            return
        for entry in living.parameters:
            refuse_replaced_data(entry.param, entry.name)
        if optimizer not in checked:
            refuse_optimizer(optimizer, living)
            _mark_states(optimizer, weak_state)
        _complete_scalar_states(optimizer, living)
        living.before_update(optimizer)  # ahead of what follows: ranks that ran the last backward have reduced by now
        living.agree(f"steps {type(optimizer).__name__}")  # before an update from local gradients
        confirm_replicated(living, is_first=optimizer not in checked)
        checked.add(optimizer)

    @torch.compiler.disable
    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = weak_state()
        if living is not None and holds_any(optimizer, living):
            living.updates += 1
            note_replicated(living)

    for handle in (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)):
        weakref.finalize(state, handle.remove)
    _watch_registrations()


@cache
def _watch_registrations() -> None:
    """Hears of each module that is put into another one, from the first partitioned model to the end of the process.

    Dynamo guards on such hooks. One that went away with a model, while another is compiled, would be an error there.
    """
    register_module_module_registration_hook(_refuse_averaging_twice)


def refuse_optimizer(optimizer: Optimizer, state: PartitionedModel) -> None:
    """Refuses an optimizer that holds parameters of a model and cannot step on them as in one process.

    Raises:
        PartitionError: Names the optimizer, a parameter and what to do.
    """
    entries = {id(entry.param): entry for entry in state.parameters}
    for group in optimizer.param_groups:
        held = [entries[id(param)] for param in group["params"] if id(param) in entries]
        problem = _problem(optimizer, group, held, state) if held else None
        if problem is not None:
            raise PartitionError(f"{type(optimizer).__name__}: {problem}; nothing was updated")


def refuse_added_parameters(optimizer: Optimizer, state: PartitionedModel) -> None:
    """Refuses a step on parameters inside a model that are no shards: nobody has averaged their gradients.

    Raises:
        PartitionError: Names the first one.
    """
    plain = {id(param) for group in optimizer.param_groups for param in group["params"] if is_plain(param)}
    for name, param in state.root.named_parameters() if plain else ():
        if id(param) in plain:
            raise PartitionError(not_taken_in(name))


def _mark_states(optimizer: Optimizer, weak_state: weakref.ref[PartitionedModel]) -> None:
    """Prevent a single rank from pickling only its rows of an optimizer's state."""

    def mark(_: Optimizer, state_dict: dict[str, Any]) -> None:
        living = weak_state()
        if living is not None:
            mark_rows((value for own in state_dict["state"].values() for value in own.values()), living)

    optimizer.register_state_dict_post_hook(mark)


def _complete_scalar_states(optimizer: Optimizer, state: PartitionedModel) -> None:
    """Turn loaded state of 0-dimensional parameters back into `DTensor`s.

    Torch treats each 0-dimensional tensor as a number, which it loads as a plain tensor
    (`set_optimizer_state_dict`, `torch.distributed.checkpoint`), and cannot compute with it and a `DTensor`.
    """
    for entry in state.parameters:
        if entry.layout.shape or entry.param not in optimizer.state:
            continue
        own = optimizer.state[entry.param]
        for key in [key for key, value in own.items() if _is_plain_scalar(value) and key not in _NUMBERS]:
            larger = [item.get(key) for param, item in optimizer.state.items() if param.dim()]
            if not any(map(_is_plain_scalar, larger)):  # otherwise it is a plain number of the optimizer
                own[key] = compat.distributed_like(entry.param.detach(), own[key])  # type: ignore[arg-type]


def _is_plain_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() == 0


def _problem(
    optimizer: Optimizer, group: Mapping[str, Any], held: Sequence[ShardedParameter], state: PartitionedModel
) -> str | None:
    """Why an optimizer cannot step on parameters of one of its groups, and what to do."""
    name, tier = held[0].name, state.arguments.offload.optimizer
    if tier and getattr(optimizer, "tier", None) != tier:
        return (
            f"it would keep the state of {name!r} on the device, and the model was partitioned with "
            f'offload={{"optimizer": "{tier}"}}: step dsgraph.offload_optimizer(optimizer, model) in its place'
        )
    if isinstance(optimizer, NEED_ALL_ROWS) and state.zero.splits_parameters:
        return (
            f"it needs all rows of a parameter at once, and holds {name!r} of a model that was partitioned with "
            f"stage={state.zero.number}, which splits rows over the ranks: take another optimizer, such as AdamW, "
            "partition with stage=0, or let dsgraph.initialize run it"
        )
    for kind, option in _UNKNOWN_ON_SHARDS:
        if isinstance(optimizer, kind) and group.get(option):
            return (
                f"torch has no step with {option}=True for the parameters of a partitioned model, such as {name!r}: "
                f"leave {option}=True out"
            )
    if isinstance(optimizer, optim.LBFGS):
        uneven = next((entry for entry in held if not _splits_evenly(entry)), None)
        if uneven is not None:
            return (
                f"it flattens gradients, which torch cannot do with {uneven.name!r}, whose {uneven.layout.shape[0]} "
                "rows do not divide by the number of ranks: take another optimizer, or partition with stage=0"
            )
    return None


def _splits_evenly(entry: ShardedParameter) -> bool:
    return not entry.layout.group or entry.layout.shape[0] % resolve_group(entry.layout.group).size() == 0


def _refuse_averaging_twice(parent: nn.Module, name: str, model: nn.Module | None) -> None:
    if model is None or not isinstance(parent, DistributedDataParallel) or not partitioned_parts(model):
        return
    raise PartitionError(
        f"DistributedDataParallel was given {type(model).__name__}, which dsgraph.partition has partitioned: its "
        "gradients are averaged over the ranks already. Use the model as it is, without DistributedDataParallel and "
        "without what wraps a model in it: take DsgraphTrainer for transformers.Trainer and DsgraphAccelerator for "
        "Accelerator, with the plain model; Lightning's strategy 'ddp' has no such; see docs/frameworks.md"
    )
