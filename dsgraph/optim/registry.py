"""Optimizers by name, as the section `optimizer` of a configuration names them.

A new optimizer is one file in this folder and one entry here. If its update is element-wise, or needs all rows of a
parameter, its class derives from `OptimizerHooks` and sets the flag for that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dsgraph.utils.errors import ConfigError
from dsgraph.utils.nearest import nearest

from .compressed_optimizer import NOT_THERE
from .lamb import Lamb
from .muon import MuonAndAdamW, inner_matrices
from .one_bit import OneBitAdam, OneBitLamb

MakesOptimizer = Callable[[list[Any]], Optimizer]
_Params = dict[str, Any]


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that a configuration can name.

    Attributes:
        name: Its name; upper and lower case are equal.
        prepare: Takes the parameters of the section, which it may change, and the model; returns a function that makes
            the optimizer from groups and parameters.
        by_layer: True if an update needs the full parameters of a layer, of which tensor-parallel ranks have slices.
        warms_up_as: The optimizer that a 1-bit optimizer is during its warm-up; empty for others.
        without_effect: Parameters of DeepSpeed's optimizer that have no effect, with the reason.
        only_default: Parameters of DeepSpeed's optimizer that are accepted with this value only.
    """

    name: str
    prepare: Callable[[_Params, nn.Module], Callable[..., Optimizer]]
    by_layer: bool = False
    warms_up_as: str = ""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    only_default: Mapping[str, Any] = field(default_factory=dict)


def _adam(params: _Params, model: nn.Module) -> Callable[..., Optimizer]:
    _set_adam_defaults(params)
    return torch.optim.AdamW if params.pop("adam_w_mode", True) else torch.optim.Adam


def _adamw(params: _Params, model: nn.Module) -> Callable[..., Optimizer]:
    _set_adam_defaults(params)
    params.pop("adam_w_mode", None)
    return torch.optim.AdamW


def _set_adam_defaults(params: _Params) -> None:
    """Set the defaults of DeepSpeed's Adam, which has no weight decay, unless torch's is asked for."""
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)
    params.setdefault("fused", True)


def _muon(params: _Params, model: nn.Module) -> Callable[..., Optimizer]:
    return partial(MuonAndAdamW, model=model, muon=inner_matrices(model))


def _one_bit(name: str, kind: Callable[..., Optimizer], *, warms_up_as: str, by_layer: bool = False) -> OptimizerEntry:
    return OptimizerEntry(
        name,
        lambda params, model: partial(kind, model=model),
        by_layer,
        warms_up_as=warms_up_as,
        without_effect={
            "cuda_aware": "dsgraph does not use MPI",
            "comm_backend_name": "dsgraph uses the process group of the mesh",
        },
        only_default=NOT_THERE,
    )


OPTIMIZERS = {
    entry.name.lower(): entry
    for entry in (
        OptimizerEntry("Adam", _adam),
        OptimizerEntry("AdamW", _adamw),
        OptimizerEntry("Lamb", lambda params, model: Lamb, by_layer=True),
        OptimizerEntry("Muon", _muon, by_layer=True),
        _one_bit("OneBitAdam", OneBitAdam, warms_up_as="AdamW"),
        _one_bit("OneBitLamb", OneBitLamb, warms_up_as="LAMB", by_layer=True),
    )
}
"""The optimizers besides those of `torch.optim`, by name in lower case."""


def entry_of(name: str) -> OptimizerEntry:
    """Return the entry of an optimizer; those of `torch.optim` are found by their exact names.

    Raises:
        ConfigError: No optimizer has the name.
    """
    if name.lower() == "zerooneadam":
        raise ConfigError(f"optimizer.type: {name} is not supported: use OneBitAdam")
    if name.lower() in OPTIMIZERS:
        return OPTIMIZERS[name.lower()]
    of_torch = {key: kind for key, kind in vars(torch.optim).items() if _is_optimizer(kind)}
    if name not in of_torch:
        own = [entry.name for entry in OPTIMIZERS.values()]
        raise ConfigError(
            f"optimizer.type is {name!r}{nearest(name, [*of_torch, *own])}; known: {', '.join(own)}, and the "
            "optimizers of torch.optim"
        )
    return OptimizerEntry(name, lambda params, model: of_torch[name])


def maker_of(name: str, given: Mapping[str, Any], model: nn.Module, *, other_keys: Mapping[str, Any]) -> MakesOptimizer:
    """Return a function that makes the optimizer that a configuration names.

    Args:
        name: `optimizer.type`.
        given: `optimizer.params`.
        model: The model whose parameters it updates.
        other_keys: Keys of the configuration outside the section, for hints.

    Raises:
        ConfigError: The name or a parameter is unknown, or the optimizer refuses a value.
    """
    entry, params = entry_of(name), dict(given)
    make = entry.prepare(params, model)
    for key in entry.without_effect:
        params.pop(key, None)
    bound = make.keywords if isinstance(make, partial) else {}
    signature = inspect.signature(make).parameters
    taken = [key for key in signature if key not in (*bound, "others")][1:]
    taken += entry.only_default
    for key in params:
        if key not in taken:
            hint = nearest(key, taken) or nearest(key, other_keys, where="at the top of the configuration")
            raise ConfigError(f"optimizer.params: {name} does not support {key!r}{hint}")
        takes_text = key in signature and "str" in str(signature[key].annotation)
        if isinstance(params[key], str) and not takes_text:
            raise ConfigError(f"optimizer.params: {key} is {params[key]!r}, a text: remove the quotes")
    if "betas" in params:
        params["betas"] = _betas(params["betas"])
    try:  # before anything of the model is changed
        make([{"params": [nn.Parameter(torch.zeros(1, 1))]}], **params)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params of {name}: {error}") from error
    return lambda groups: make(groups, **params)


def _betas(given: object) -> tuple[float, ...]:
    numbers = tuple(given) if isinstance(given, list | tuple) else ()
    are_rates = all(isinstance(number, int | float) and 0 <= number < 1 for number in numbers)
    if len(numbers) != 2 or not are_rates:
        raise ConfigError(f"optimizer.params: betas is {given!r}; it takes two numbers, each from 0 to less than 1")
    return numbers


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
