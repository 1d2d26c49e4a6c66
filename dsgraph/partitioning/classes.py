"""The classes of a partitioned model's modules: subclasses of their own, which hand out parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from dsgraph.compat.modules import apply_to_tensors
from dsgraph.passes import ParameterSpec
from dsgraph.utils.errors import PartitionError

from .parameter import ParameterState
from .rows import distributed_like, own_part
from .seam import property_for
from .stages import ZeroStage
from .state import PartitionState, held_by, hold
from .state_dict.full_state_dict import take_rows
from .state_dict.saved_rows import save_rows

# In the body of a class that was made here: the parameters that its modules hold, by attribute, without names.
_SPECS = "_dsgraph_specs"
# Also there: the names of the other attributes that it overrides.
_OVERRIDES = "_dsgraph_overrides"

Methods = Callable[[nn.Module], Mapping[str, Any]]


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was partitioned."""
    found = type(module)
    return cast("type[nn.Module]", found.__mro__[1]) if _SPECS in found.__dict__ else found


def overrides(module: nn.Module) -> frozenset[str]:
    """Return the names that the class made by `partition` overrides besides parameters; empty for any other class."""
    found: frozenset[str] = type(module).__dict__.get(_OVERRIDES, frozenset())
    return found


def swap_classes(
    model: nn.Module, part: PartitionState, parameters: Iterable[ParameterState], methods: Methods
) -> None:
    """Give each module of `model` that holds parameters a subclass of its class with one property a parameter.

    Modules of one class with equal parameters and equal other overrides share a subclass. A module that already has its
    subclass is left alone.

    Args:
        model: The partitioned model.
        part: Its table.
        parameters: All that are in the table, or will be.
        methods: Further overrides of a module's subclass; a module with such overrides gets a subclass even without
            parameters.
    """
    entries: dict[nn.Module, dict[str, ParameterState]] = {}
    for entry in parameters:
        for module, attribute in entry.owners:
            entries.setdefault(module, {})[attribute] = entry
    classes: dict[Any, type[nn.Module]] = {}
    for module in part.root.modules():
        if _SPECS in type(module).__dict__:
            known: dict[str, ParameterSpec] = type(module).__dict__[_SPECS]
            classes.setdefault((plain_class(module), tuple(known.items()), overrides(module)), type(module))
    for module in model.modules():
        own, original, changed = entries.get(module, {}), plain_class(module), methods(module)
        by_name = {attribute: _without_name(entry.spec) for attribute, entry in own.items()}
        if not by_name and not changed:
            continue
        if by_name and not hold(module, part).parameters:
            module.register_load_state_dict_pre_hook(take_rows)
        hold(module, part).parameters.update(own)
        key = (original, tuple(by_name.items()), frozenset(changed))
        if key not in classes:
            classes[key] = _class_for(original, by_name, part.zero, changed)
        module.__class__ = classes[key]
    hold(model, part)


def _without_name(spec: ParameterSpec) -> ParameterSpec:
    return replace(spec, name="", requires_grad=True)


def _class_for(
    original: type[nn.Module], specs: Mapping[str, ParameterSpec], zero: ZeroStage, methods: Mapping[str, Any]
) -> type[nn.Module]:
    body: dict[str, Any] = {name: property_for(name, spec, zero) for name, spec in specs.items()}
    body |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    body |= {**methods, _SPECS: dict(specs), _OVERRIDES: frozenset(methods), "__reduce_ex__": _refuse_to_pickle}
    body["_apply"] = lambda self, fn, *args, **named: _apply(self, original, fn, *args, **named)
    if specs:
        body["_save_to_state_dict"] = lambda self, *args: save_rows(original, self, *args)
    if issubclass(original, nn.RNNBase):
        body["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    if not hasattr(original, "__deepcopy__"):
        body["__deepcopy__"] = lambda self, memo: _copy(self, original, memo, lambda value: copy.deepcopy(value, memo))
    if not hasattr(original, "__copy__"):
        body["__copy__"] = lambda self: _copy(self, original, {}, lambda value: value)
    return cast("type[nn.Module]", type(original.__name__, (original,), body))


def _flat_weights(self: Any) -> list[Any]:
    """Return the flat list of an RNN's weights, read from the attributes at each use."""
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _refuse_to_pickle(self: nn.Module, protocol: object) -> NoReturn:
    raise PartitionError(
        f"{type(self).__name__} is part of a partitioned model, which cannot be pickled (torch.save(model)): shards "
        "belong to these ranks. Save model.state_dict() with torch.distributed.checkpoint, or the full tensors "
        "that torch.distributed.checkpoint.state_dict.get_model_state_dict gathers"
    )


def _allowed(self: nn.Module, change: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a module applies to its parameters, with a result that keeps their placements.

    Refuse `share_memory`, at which torch would crash.
    """
    if getattr(change, "__qualname__", "").startswith("Module.share_memory."):
        raise PartitionError(
            f"{type(self).__name__} is part of a partitioned model, whose shards cannot be moved to shared memory: "
            "call model.share_memory() before dsgraph.partition"
        )

    def changed(value: Tensor) -> Tensor:
        made: Tensor = change(value)
        return made if made is value else distributed_like(value, own_part(made))

    return changed


def _apply(module: nn.Module, original: type[nn.Module], change: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Convert a module as `nn.Module._apply` does."""
    entries = held_by(module).parameters.values()
    before = [(entry.param.dtype, entry.param.device) for entry in entries]
    found = apply_to_tensors(original, module, _allowed(module, change), *args, **named)
    if before != [(entry.param.dtype, entry.param.device) for entry in entries]:
        held_by(module).partition.step.drop()  # plans have the dtypes and devices of before
    for entry in entries:
        if entry.stand_ins:
            entry.renew_stand_ins()
    return found


def _copy(
    module: nn.Module, original: type[nn.Module], memo: dict[int, Any], copied: Callable[[Any], Any]
) -> nn.Module:
    """Copy a module as `copy` does with an object that defines no copying."""
    reduced: Any = original.__reduce_ex__(module, 4)
    make, arguments, state, *_ = reduced
    made: nn.Module = make(*copied(arguments))
    memo[id(module)] = made
    made.__setstate__(dict(copied(state)))
    return made
