"""The optimizer of an engine: by the name in the configuration, or the caller's own, taken over to the shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsgraph.engine.config.engine_config import EngineConfig, OptimizerConfig
from dsgraph.utils.errors import ConfigError
from dsgraph.utils.nearest import nearest

from .compressed_optimizer import FREEZE_STEP, NOT_THERE
from .lamb import Lamb
from .muon import MuonAndAdamW, inner_matrices
from .one_bit import OneBitAdam, OneBitLamb

_NOT_YET = ("zerooneadam",)
ONE_BIT: Mapping[str, Any] = {"onebitadam": OneBitAdam, "onebitlamb": OneBitLamb}
WITHOUT_EFFECT = {"cuda_aware": "MPI carries nothing", "comm_backend_name": "the mesh's process group carries all"}

MakesOptimizer = Callable[[list[Any]], Optimizer]
Groups = list[dict[str, Any]]


def maker_of(config: OptimizerConfig, model: nn.Module) -> MakesOptimizer:
    """What makes the optimizer that a configuration names.

    Args:
        config: The section of the file.
        model: What it is for.

    Raises:
        ConfigError: An unknown name or parameter, or a value that the optimizer refuses.
    """
    params = dict(config.params)
    name = config.type
    if name.lower() in _NOT_YET:
        raise ConfigError(f"optimizer.type: {name} is not there yet: OneBitAdam is")
    if name.lower() in ("adam", "adamw"):
        decoupled = params.pop("adam_w_mode", True) or name.lower() == "adamw"
        # One implementation serves both. Of DeepSpeed's own Adam the default is no decay, of torch's it is torch's.
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)
        made: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
        params.setdefault("fused", True)
    elif name.lower() in ONE_BIT:
        made = partial(ONE_BIT[name.lower()], model=model)
        for key in WITHOUT_EFFECT:
            params.pop(key, None)
    elif name.lower() == "lamb":
        made = Lamb
    elif name.lower() == "muon":
        made = partial(MuonAndAdamW, model=model, muon=inner_matrices(model))
    else:
        known = {key: kind for key, kind in vars(torch.optim).items() if _is_optimizer(kind)}
        if name not in known:
            raise ConfigError(
                f"optimizer.type is {name!r}{nearest(name, known)}; known: Adam, AdamW, Lamb, Muon, OneBitAdam, "
                "OneBitLamb, and the optimizers of torch.optim"
            )
        made = known[name]
    bound = made.keywords if isinstance(made, partial) else {}
    taken = [key for key in inspect.signature(made).parameters if key not in (*bound, "others")][1:]
    taken += NOT_THERE if name.lower() in ONE_BIT else []
    for key in params:
        if key not in taken:
            hint = nearest(key, taken) or nearest(
                key, EngineConfig.model_fields, where="at the top of the configuration"
            )
            raise ConfigError(f"optimizer.params: {name} has no {key!r}{hint}")
    if "betas" in params:
        params["betas"] = _betas(params["betas"])
    try:  # before anything of the model is changed
        made([{"params": [nn.Parameter(torch.zeros(1, 1))]}], **params)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params of {name}: {error}") from error
    return lambda groups: made(groups, **params)


def _betas(given: object) -> tuple[float, ...]:
    numbers = tuple(given) if isinstance(given, list | tuple) else ()
    are_rates = all(isinstance(number, int | float) and 0 <= number < 1 for number in numbers)
    if len(numbers) != 2 or not are_rates:
        raise ConfigError(f"optimizer.params: betas is {given!r}; it takes two numbers, each from 0 to less than 1")
    return numbers


def check_config(settings: EngineConfig, *, is_divided: bool) -> list[str]:
    """Checks what a configuration says of the optimizer where there is no model: an empty module stands for it.

    Args:
        settings: The configuration.
        is_divided: Whether several ranks run one copy of the model.

    Returns:
        As `check_compression`.

    Raises:
        ConfigError: See `maker_of` and `check_compression`.
    """
    if settings.optimizer is not None:
        maker_of(settings.optimizer, nn.Module())
    return check_compression(settings, is_divided=is_divided)


def check_compression(settings: EngineConfig, *, is_divided: bool) -> list[str]:
    """Refuses what cannot go with compressed gradients, before anything is changed.

    Args:
        settings: The configuration.
        is_divided: Whether several ranks run one copy of the model.

    Returns:
        A line for each key without effect, and for `freeze_step` where it is left to its default.

    Raises:
        ConfigError: Names the key.
    """
    optimizer, zero = settings.optimizer, settings.zero_optimization
    if optimizer is None or optimizer.type.lower() not in ONE_BIT:
        return []
    name = optimizer.type
    if zero.stage > 1:
        raise ConfigError(
            f"optimizer.type {name} with zero_optimization.stage {zero.stage}: no rank would hold the momentum of a "
            "whole parameter, which takes in the rank's gradient: set the stage to 0 or 1"
        )
    if zero.offload_optimizer.device != "none":
        raise ConfigError(
            f"optimizer.type {name} with zero_optimization.offload_optimizer: graphs read the momentum, which has to "
            "be in memory: remove offload_optimizer"
        )
    if is_divided:
        raise ConfigError(f"optimizer.type {name} with the section parallel is not there yet: remove one of the two")
    notes = [
        f"optimizer.params.{key} has no effect: {why}" for key, why in WITHOUT_EFFECT.items() if key in optimizer.params
    ]
    if "freeze_step" not in optimizer.params:
        warm = "AdamW" if name.lower() == "onebitadam" else "LAMB"
        notes.append(
            f"optimizer.params.freeze_step is not set: {name} trains as {warm} for {FREEZE_STEP:,} steps, the default, "
            "before it compresses anything: set it to 15 to 25 % of the steps of the training, behind the warm-up of "
            "the learning rate"
        )
    if settings.gradient_clipping:
        bound = settings.gradient_clipping
        is_set = "gradient_clipping" in settings.model_fields_set
        clipping = f"gradient_clipping {bound}" if is_set else f"gradient_clipping, {bound} by default,"
        notes.append(
            f"{clipping} is of the warm-up of {name}: behind it no rank sees the averaged gradient, and nothing is "
            "clipped"
        )
    return notes


def check_float32(settings: EngineConfig, updated: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses parameters whose momentum cannot be compressed, before anything is changed.

    Args:
        settings: The configuration, whose optimizer updates them.
        updated: Parameters by their names.

    Raises:
        ConfigError: Names the first that is not float32.
    """
    optimizer = settings.optimizer
    if optimizer is None or optimizer.type.lower() not in ONE_BIT:
        return
    for name, param in updated:
        if param.dtype != torch.float32:
            raise ConfigError(
                f"optimizer.type {optimizer.type}: {name} is {param.dtype}, and momentum and errors are float32: "
                "convert the model to float32; the sections bf16 and fp16 have the forward run in 16 bits"
            )


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer


class Binding:
    """Which parameters an optimizer is to update, by name, while `partition` puts shards in their place."""

    def __init__(self, model: nn.Module, wanted: Iterable[Any] | None) -> None:
        """Takes down what is wanted.

        Args:
            model: The model, not yet partitioned.
            wanted: Parameters, or groups as `torch.optim` takes them; None: all that are trained.

        Raises:
            ConfigError: One that is no parameter of the model.
        """
        names = {id(param): name for name, param in model.named_parameters()}
        if wanted is None:
            wanted = [param for param in model.parameters() if param.requires_grad]
        items = list(wanted)
        groups = items if items and isinstance(items[0], Mapping) else [{"params": items}]
        self._groups = [
            {**group, "params": [_name(param, names) for param in _listed(group["params"])]} for group in groups
        ]

    def groups(self, model: nn.Module) -> Groups:
        """The groups over the parameters that the model has now."""
        params = dict(model.named_parameters())
        return [{**group, "params": [params[name] for name in group["params"]]} for group in self._groups]

    def named(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """The parameters that the model has now, with their names."""
        params = dict(model.named_parameters())
        return [(name, params[name]) for group in self._groups for name in group["params"]]


def parameters_in(wanted: Iterable[Any]) -> Iterator[Any]:
    """Each parameter of what `torch.optim` takes: parameters, pairs of a name and a parameter, or groups of them."""
    for item in wanted:
        if isinstance(item, Mapping):
            yield from parameters_in(_listed(item["params"]))
        else:
            yield item[1] if isinstance(item, tuple) else item


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _name(param: object, names: Mapping[int, str]) -> str:
    if isinstance(param, tuple):  # of named_parameters
        param = param[1]
    if id(param) not in names:
        what = tuple(param.shape) if isinstance(param, Tensor) else repr(param)
        raise ConfigError(f"initialize: the optimizer is to update {what}, which is no parameter of the model")
    return names[id(param)]


@contextmanager
def rebound(optimizer: Optimizer | None, model: nn.Module) -> Iterator[None]:
    """Inside, a caller's optimizer holds nothing; behind it, the shards of what it held before.

    Raises:
        ConfigError: The optimizer has stepped already, or holds parameters of something else.
    """
    if optimizer is None:
        yield
        return
    if optimizer.state:
        raise ConfigError(
            f"initialize: {type(optimizer).__name__} has stepped already, and its state is of whole parameters: pass a "
            "new one, and load its state from a checkpoint"
        )
    held = [list(group["params"]) for group in optimizer.param_groups]
    binding = Binding(model, [{"params": params} for params in held])
    for group in optimizer.param_groups:
        group["params"] = []
    try:
        yield
        held = [group["params"] for group in binding.groups(model)]
    finally:
        for group, params in zip(optimizer.param_groups, held, strict=True):
            group["params"] = params
