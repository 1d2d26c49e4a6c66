"""Construction of the optimizer and the scheduler of an engine: the caller's own, or by the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dsgraph.optim.hooks import Groups
from dsgraph.optim.registry import MakesOptimizer
from dsgraph.utils.errors import ConfigError

from .config.engine_config import EngineConfig, OptimizerConfig
from .optimizers.optimizer_section import check_compression, maker_of_section
from .schedules.by_name import schedule_class


@dataclass(frozen=True)
class Makers:
    """Functions that make the optimizer and the scheduler, once there are shards.

    Attributes:
        given: The caller's optimizer; None if it is to be made.
        optimizer: Makes the optimizer, from groups of parameters.
        schedule: Makes the scheduler of an optimizer; it returns None without one.
        notes: Keys of the optimizer that have no effect, in lines.
        by_name: The section of the configuration that names the optimizer; None if the caller makes it.
    """

    given: Optimizer | None
    optimizer: MakesOptimizer
    schedule: Callable[[Optimizer], Any]
    notes: list[str]
    by_name: OptimizerConfig | None = None

    def over(self, model: nn.Module) -> Makers:
        """Return makers for another model that has the parameters, such as this rank's shards."""
        return self if self.by_name is None else replace(self, optimizer=maker_of_section(self.by_name, model))


def resolve_makers(
    optimizer: Optimizer | MakesOptimizer | None,
    lr_scheduler: Any,
    settings: EngineConfig,
    model: nn.Module,
) -> Makers:
    """Choose how the optimizer and the scheduler are made.

    Args:
        optimizer: See `initialize`.
        lr_scheduler: See `initialize`.
        settings: The sections of the configuration.
        model: The model, not partitioned yet.

    Raises:
        ConfigError: There is no optimizer, or the configuration does not fit it.
    """
    mine, make = _optimizer_or_maker(optimizer, settings, model)
    schedule = _schedule_maker(lr_scheduler, settings, mine)
    notes = check_compression(settings) if optimizer is None else []
    return Makers(mine, make, schedule, notes, settings.optimizer if optimizer is None else None)


def _optimizer_or_maker(
    given: Any, settings: EngineConfig, model: nn.Module
) -> tuple[Optimizer | None, MakesOptimizer]:
    if isinstance(given, Optimizer):
        return given, lambda _: given
    if given is not None:
        if not callable(given):
            raise ConfigError(
                f"initialize: optimizer is {given!r}: expected an optimizer, or a function that makes one from "
                "parameters. To choose one by name, set optimizer.type in the configuration"
            )
        return None, partial(_call, given)
    if settings.optimizer is None:
        raise ConfigError("initialize: no optimizer: pass one, or set optimizer.type in the configuration")
    return None, maker_of_section(settings.optimizer, model)


def _call(make: Callable[[Groups], Any], groups: Groups) -> Optimizer:
    made = make(groups)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"initialize: optimizer returned a {type(made).__name__}; it must return a torch.optim.Optimizer"
        )
    return made


def _schedule_maker(given: Any, settings: EngineConfig, mine: Optimizer | None) -> Callable[[Optimizer], Any]:
    if given is not None:
        if isinstance(given, LRScheduler) and given.optimizer is not mine:
            raise ConfigError(
                f"initialize: lr_scheduler is a {type(given).__name__} for another optimizer than the engine's: pass a "
                "function that makes a scheduler from an optimizer, or pass that optimizer as well"
            )
        if not hasattr(given, "step") and not callable(given):
            raise ConfigError(
                f"initialize: lr_scheduler is {given!r}: expected a scheduler, or a function that makes one from the "
                "optimizer"
            )
        return (lambda _: given) if hasattr(given, "step") else given
    if settings.scheduler is None:
        return lambda _: None
    params = settings.scheduler.params
    return partial(schedule_class(settings.scheduler.type, params), **params)
