"""DeepSpeed's way to checkpoint activations: a function that marks a region, and switches for the whole process.

The switches are those of the configuration's section `activation_checkpointing`. DeepSpeed's scripts set them by a call
before they make their engine; the next engine takes them from here.
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
    """What `configure` was given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] | None = None
        self.are_taken = False  # by an engine


_SWITCHES = _Switches()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose inner values are computed again in the backward, instead of kept.

    Random numbers are drawn again as they were. The region is one of `torch.utils.checkpoint`, without reentrance.

    Args:
        function: What to call, such as a layer.
        args: Its arguments.
        kwargs: More of them.
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
    """Sets how the engine that is made next treats what the backward needs. An argument goes before the configuration.

    Args:
        mpu_: Not there yet; None.
        deepspeed_config: A JSON file, or what would stand in it; its section `activation_checkpointing` counts.
        partition_activations: See docs/reference/config.md, as of the others.
        contiguous_checkpointing: `contiguous_memory_optimization`.
        num_checkpoints: `number_checkpoints`.
        checkpoint_in_cpu: `cpu_checkpointing`.
        synchronize: `synchronize_checkpoint_boundary`.
        profile: `profile`.

    Raises:
        ConfigError: A value is wrong, what it asks for is not there yet, or an engine was made since the last `reset`.
    """
    if _SWITCHES.are_taken:
        raise ConfigError(
            "checkpointing.configure: an engine was made already: call it before dsgraph.initialize; for the next "
            "engine call dsgraph.checkpointing.reset() first"
        )
    if mpu_ is not None:
        raise ConfigError("checkpointing.configure: mpu is not there yet: pass None")
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
    """The section that goes before the configuration's, for an engine that is about to be made."""
    _SWITCHES.are_taken = True
    return {} if _SWITCHES.given is None else {SECTION: _SWITCHES.given}


def is_configured() -> bool:
    """Whether `configure` was called, and not `reset` since."""
    return _SWITCHES.given is not None


def reset() -> None:
    """Forgets what `configure` was given."""
    _SWITCHES.given, _SWITCHES.are_taken = None, False
