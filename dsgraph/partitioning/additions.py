"""Additions to a partitioned model since it was partitioned, and removals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor

from dsgraph.passes.ir.parameters import ParameterSlice
from dsgraph.utils.errors import PartitionError

from .parameter import ParameterState
from .state import PartitionState

Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class Additions:
    """The differences between a partitioned model and its table.

    Attributes:
        root: The outermost partitioned module.
        parameters: New parameters, which are no shards of the table, by name.
        tied: Further places that hold shards of the table.
        gone: Places of the table that no longer hold their shards.
        slices: id of each parameter that is this rank's slice of a tensor-parallel one -> how it is sliced.
    """

    root: nn.Module
    parameters: dict[str, nn.Parameter]
    tied: list[tuple[ParameterState, Place]]
    gone: list[tuple[ParameterState, Place]]
    slices: Mapping[int, ParameterSlice] = field(default_factory=dict)


def part_to_extend(
    model: nn.Module, parts: list[PartitionState], given: Mapping[str, object], mesh: DeviceMesh | None
) -> PartitionState:
    """Return the table to which new parameters of a model are added.

    Raises:
        PartitionError: There are several, or the arguments differ from those of the first call.
    """
    if len(parts) > 1:
        raise PartitionError(
            f"the model ({type(model).__name__}) holds {len(parts)} modules that were partitioned apart: call "
            "dsgraph.partition with the one of them that has got new parameters"
        )
    (part,) = parts
    part.refuse_amid_step("partition")
    was = {field.name: getattr(part.arguments, field.name) for field in fields(part.arguments)} | {"mesh": part.mesh}
    for name, value in {**given, "mesh": mesh or part.mesh}.items():
        if value != was[name]:
            raise PartitionError(
                f"the model ({type(model).__name__}) is partitioned already, with {name}={was[name]}; new modules are "
                f"partitioned in the same way: leave {name}={value} out"
            )
    return part


def find_ignored(model: nn.Module, params: Iterable[nn.Parameter] | None) -> set[Place]:
    """Return the places of the parameters that `partition` leaves out, each rank's own.

    Raises:
        PartitionError: One is not a plain parameter of the model with values.
    """
    ignored: dict[int, Any] = {id(param): param for param in (() if params is None else params)}
    places = {id(param): name for name, param in model.named_parameters()}
    for key, param in ignored.items():
        if key not in places:
            raise PartitionError(
                f"ignored_params: it takes parameters of the model, found {type(param).__name__} "
                f"{list(getattr(param, 'shape', ()))}: pass those that model.parameters() returns"
            )
        if isinstance(param, DTensor) or param.is_meta:
            found = "a DTensor already" if isinstance(param, DTensor) else "on the meta device"
            raise PartitionError(f"ignored_params: {places[key]!r} is {found}; it takes plain parameters with values")
    return {
        (module, attribute)
        for module in model.modules()
        for attribute, param in module._parameters.items()
        if id(param) in ignored
    }


def mark_gradients(ignored: Iterable[Place]) -> None:
    """Mark gradients of these parameters, of which each rank has its own, for `clip_grad_norm_`; see `rules.py`."""
    for param in {module._parameters[attribute] for module, attribute in ignored}:
        assert param is not None
        param.dsgraph_own = True  # type: ignore[attr-defined]
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda param: setattr(param.grad, "dsgraph_own", True))


def find_additions(model: nn.Module, part: PartitionState) -> Additions:
    """Compare a partitioned model with its table.

    Args:
        model: The model, a module inside it, or one that has been built around it.
        part: The table.

    Raises:
        PartitionError: The model shares modules with the table, and is none of these.
    """
    root = _root(model, part)
    places = [(entry, place) for entry in part.parameters for place in entry.owners]
    present = {id(module) for module in root.modules()}
    gone = [(entry, place) for entry, place in places if id(place[0]) not in present or _shard_at(*place) is None]
    shards = {id(_shard_at(*place)): entry for entry, place in places if _shard_at(*place) is not None}
    known = {(id(module), attribute) for _, (module, attribute) in places}
    names = {id(param): name for name, param in root.named_parameters()}
    new: dict[str, nn.Parameter] = {}
    tied = []
    for module in root.modules():
        for attribute, param in module._parameters.items():
            if param is None or (isinstance(param, DTensor) and (id(module), attribute) in known):
                continue
            if (module, attribute) in part.ignored:
                continue
            if isinstance(param, DTensor) and id(param) in shards:
                tied.append((shards[id(param)], (module, attribute)))
            else:
                new[names[id(param)]] = param
    return Additions(root, new, tied, gone)


def added_since(part: PartitionState) -> str | None:
    """Return the name of a trainable parameter that was added to a model after it was partitioned, if there is one."""
    places = (*part.ignored, *(place for entry in part.parameters for place in entry.owners))
    known = {(id(module), attribute) for module, attribute in places}
    for prefix, module in part.root.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None and is_plain(param) and (id(module), attribute) not in known:
                return f"{prefix}.{attribute}" if prefix else attribute
    return None


def is_plain(param: Tensor) -> bool:
    """Return True for a parameter that is trained and is not a shard."""
    return param.requires_grad and not isinstance(param, DTensor)


def _root(model: nn.Module, part: PartitionState) -> nn.Module:
    if any(module is part.root for module in model.modules()):
        return model
    if any(module is model for module in part.root.modules()):
        return part.root
    raise PartitionError(
        f"{type(model).__name__} shares modules with a {type(part.root).__name__} that is partitioned, and has new "
        "modules too: call dsgraph.partition with the new ones alone"
    )


def _shard_at(module: nn.Module, attribute: str) -> DTensor | None:
    param = module._parameters.get(attribute)
    return param if isinstance(param, DTensor) else None
