"""DeepSpeed's API for activation checkpointing: a function that marks a region, and settings for the whole process.

The settings are those of the configuration's section `activation_checkpointing`. DeepSpeed's scripts set them by a call
before they make their engine; the next engine reads them from here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.utils.checkpoint

from dsgraph.utils.errors import ConfigError

from .config.read_config import check_section, load_config

SECTION = "activation_checkpointing"


class _Switches:
    """The values that `configure` was given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] | None = None
        self.are_taken = False  # by an engine


_SWITCHES = _Switches()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose activations are recomputed in the backward, instead of kept.

    The same random numbers are drawn again. It is a region of `torch.utils.checkpoint` with `use_reentrant=False`.

    Args:
        function: The function to call, such as a layer.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how the next engine checkpoints activations. Arguments override the configuration.

    Args:
        mpu_: Not supported yet; must be None.
        deepspeed_config: A JSON file, or its content; its section `activation_checkpointing` is used.
        partition_activations: See docs/reference/config.md, as for the others.
        contiguous_checkpointing: `contiguous_memory_optimization`.
        num_checkpoints: `number_checkpoints`.
        checkpoint_in_cpu: `cpu_checkpointing`.
        synchronize: `synchronize_checkpoint_boundary`.
        profile: `profile`.

    Raises:
        ConfigError: A value is wrong or not supported yet, or an engine was made since the last `reset`.
    """
    if _SWITCHES.are_taken:
        raise ConfigError(
            "checkpointing.configure: an engine was made already: call it before dsgraph.initialize; for the next "
            "engine call dsgraph.checkpointing.reset() first"
        )
    if mpu_ is not None:
        raise ConfigError("checkpointing.configure: mpu is not supported yet: pass None")
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = load_config(deepspeed_config).get(SECTION) if deepspeed_config is not None else None
    given = {**(section or {}), **{key: value for key, value in arguments.items() if value is not None}}
    check_section(SECTION, given)
    _SWITCHES.given = given


def take_switches() -> dict[str, dict[str, Any]]:
    """Return the section that overrides the configuration's, for an engine that is about to be made."""
    _SWITCHES.are_taken = True
    return {} if _SWITCHES.given is None else {SECTION: _SWITCHES.given}


def is_configured() -> bool:
    """Return whether `configure` was called, and not `reset` since."""
    return _SWITCHES.given is not None


def reset() -> None:
    """Forget the values that `configure` was given."""
    _SWITCHES.given, _SWITCHES.are_taken = None, False
