"""The section `optimizer` of a configuration: what it makes, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dsgraph.engine.config.engine_config import EngineConfig, OptimizerConfig
from dsgraph.optim.compressed_optimizer import FREEZE_STEP
from dsgraph.optim.registry import MakesOptimizer, entry_of, maker_of
from dsgraph.utils.errors import ConfigError


def maker_of_section(config: OptimizerConfig, model: nn.Module) -> MakesOptimizer:
    """Return a function that makes the optimizer of the section; see `maker_of`."""
    return maker_of(config.type, config.params, model, other_keys=EngineConfig.model_fields)


def check_config(settings: EngineConfig) -> list[str]:
    """Check the section `optimizer` without a model; an empty module replaces it.

    Args:
        settings: The configuration.

    Returns:
        As `check_compression`.

    Raises:
        ConfigError: See `maker_of_section` and `check_compression`.
    """
    if settings.optimizer is not None:
        maker_of_section(settings.optimizer, nn.Module())
    return check_compression(settings)


def check_compression(settings: EngineConfig) -> list[str]:
    """Raise an error for settings that 1-bit compression does not support, before anything is changed.

    Args:
        settings: The configuration.

    Returns:
        A line for each key without effect, and for `freeze_step` where it is left to its default.

    Raises:
        ConfigError: Names the key.
    """
    optimizer, zero = settings.optimizer, settings.zero_optimization
    if optimizer is None or not (entry := entry_of(optimizer.type)).warms_up_as:
        return []
    name = optimizer.type
    if zero.stage > 1:
        raise ConfigError(
            f"optimizer.type {name} with zero_optimization.stage {zero.stage}: 1-bit compression needs the "
            "full momentum on each rank. Set the stage to 0 or 1"
        )
    if zero.offload_optimizer.device != "none":
        raise ConfigError(
            f"optimizer.type {name} with zero_optimization.offload_optimizer: compiled graphs read the momentum, so it "
            "must be on the device. Remove offload_optimizer"
        )
    if settings.has_stages and settings.dsgraph.memory_limit is not None:
        uncounted = "dsgraph.memory_limit does not count momentum and errors of compression there"
        raise ConfigError(f"optimizer.type {name} with pipeline stages: {uncounted}. Remove one of the two")
    notes = [
        f"optimizer.params.{key} has no effect: {why}"
        for key, why in entry.without_effect.items()
        if key in optimizer.params
    ]
    if "freeze_step" not in optimizer.params:
        notes.append(
            f"optimizer.params.freeze_step is not set: {name} trains as {entry.warms_up_as} for {FREEZE_STEP:,} steps, "
            "the default, before it compresses anything: set it to 15 to 25 % of the training steps, later than the "
            "warm-up of the learning rate"
        )
    if settings.gradient_clipping:
        bound = settings.gradient_clipping
        is_set = "gradient_clipping" in settings.model_fields_set
        clipping = f"gradient_clipping {bound}" if is_set else f"gradient_clipping, {bound} by default,"
        notes.append(
            f"{clipping} has an effect only during the warm-up of {name}: after it no rank has the averaged gradient, "
            "and nothing is clipped"
        )
    return notes


def check_float32(settings: EngineConfig, updated: Iterable[tuple[str, Tensor]]) -> None:
    """Raise an error for parameters whose momentum cannot be compressed, before anything is changed.

    Args:
        settings: The configuration, whose optimizer updates them.
        updated: Parameters by their names.

    Raises:
        ConfigError: Names the first that is not float32.
    """
    optimizer = settings.optimizer
    if optimizer is None or not entry_of(optimizer.type).warms_up_as:
        return
    for name, param in updated:
        if param.dtype != torch.float32:
            raise ConfigError(
                f"optimizer.type {optimizer.type}: {name} is {param.dtype}, and momentum and errors are float32: "
                "convert the model to float32; the sections bf16 and fp16 have the forward run in 16 bits"
            )
