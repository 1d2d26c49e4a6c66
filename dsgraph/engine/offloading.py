"""The configuration's `offload_optimizer` and `offload_param`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dsgraph.byte_counts import on_device
from dsgraph.errors import ConfigError, OffloadError
from dsgraph.offload.optimizer import OptimizerOnDisk
from dsgraph.offload.plan import plan_offload

from .config import EngineConfig, OffloadOptimizerConfig, OffloadParamConfig


def check_offload(settings: EngineConfig, device: torch.device) -> None:
    """Refuses what could not be done, before anything is changed.

    Raises:
        ConfigError: No folder for the disk, or a device from which nothing is offloaded yet.
    """
    zero = settings.zero_optimization
    for key, wanted in _wanted(settings).items():
        if wanted.device == "nvme" and wanted.nvme_path is None:
            raise ConfigError(f"{key}.device is 'nvme': set {key}.nvme_path to a folder on that disk")
        if wanted.device != "nvme" and wanted.nvme_path is not None:
            raise ConfigError(f"{key}.nvme_path has no effect with device {wanted.device!r}: set it to 'nvme'")
        if wanted.device != "nvme" and wanted.ratio != 1:
            raise ConfigError(f"{key}.ratio has no effect with device {wanted.device!r}: it is of what lies on disk")
        if wanted.device != "none" and device.type != "cpu":
            raise ConfigError(f"{key}: offloading from {device.type} is not there yet: remove the key")
    if zero.offload_param.device == "nvme" and zero.stage != 3:
        raise ConfigError(
            f"zero_optimization.offload_param: stage {zero.stage} keeps parameters in memory: set the stage to 3"
        )


def planned(
    settings: EngineConfig, model: nn.Module, device: torch.device, *, ranks: int, is_divided: bool
) -> tuple[EngineConfig, list[str]]:
    """The settings with what has to lie on disk, and what is printed of it: `dsgraph.offload_folder` asks for that.

    Half of `dsgraph.memory_limit` is for the model's states, the other half is left to activations.

    Raises:
        ConfigError: The model does not fit, there is no limit, a section says already what lies where, or the device is
            one from which nothing is offloaded yet.
    """
    own, zero = settings.dsgraph, settings.zero_optimization
    if own.offload_folder is None:
        return settings, []
    if device.type != "cpu":
        raise ConfigError(f"dsgraph.offload_folder: offloading from {device.type} is not there yet: remove the key")
    if own.memory_limit is None:
        raise ConfigError("dsgraph.offload_folder has no effect without a limit: set dsgraph.memory_limit as well")
    chosen = [key for key, wanted in _wanted(settings).items() if wanted.device != "none"]
    if chosen or is_divided:
        other = chosen[0] if chosen else "the section parallel"
        raise ConfigError(f"dsgraph.offload_folder beside {other}: remove one of the two")
    limit = on_device(own.memory_limit, "cpu")
    threshold = zero.param_persistence_threshold
    try:
        plan = plan_offload(
            model,
            memory_limit=limit // 2,
            folder=own.offload_folder,
            stage=zero.stage,
            ranks=ranks,
            **({} if threshold is None else {"keep_whole_below": threshold}),
        )
    except OffloadError as error:
        raise ConfigError(
            f"dsgraph.memory_limit is {limit:,} bytes, of which half is for the model's states: {error}"
        ) from error
    disk: dict[str, Any] = {"device": "nvme", "nvme_path": own.offload_folder}
    changes: dict[str, Any] = {}
    if plan.optimizer_ratio:
        changes["offload_optimizer"] = OffloadOptimizerConfig(**disk, ratio=plan.optimizer_ratio)
    if plan.parameters_ratio:
        changes["offload_param"] = OffloadParamConfig(**disk, ratio=plan.parameters_ratio)
    update = {
        "zero_optimization": zero.model_copy(update=changes),
        "dsgraph": own.model_copy(update={"memory_limit": plan.limit_of_graphs(limit)}),
    }
    return settings.model_copy(update=update), [str(plan)]


def partition_offload(settings: EngineConfig) -> dict[str, Any] | None:
    """What `partition` is told of it."""
    wanted = settings.zero_optimization.offload_param
    if wanted.device != "nvme":
        return None
    assert wanted.nvme_path is not None
    return {"parameters": "disk", "folder": wanted.nvme_path, "ratio": wanted.ratio}


def offloaded(optimizer: Optimizer, settings: EngineConfig) -> Optimizer:
    """The optimizer itself, or, if its state is to lie elsewhere, what runs it so.

    Raises:
        OffloadError: It is no optimizer whose state can lie there, or the disk has too few bytes free.
    """
    wanted = settings.zero_optimization.offload_optimizer
    if wanted.device != "nvme":
        return optimizer
    assert wanted.nvme_path is not None
    folder = Path(wanted.nvme_path)
    folder.mkdir(parents=True, exist_ok=True)
    return OptimizerOnDisk(optimizer, folder=folder, ratio=wanted.ratio)


def offload_notes(settings: EngineConfig) -> list[str]:
    """What is printed of it."""
    return [
        f"{key} has no effect: the model is trained on the CPU, and all of it is there"
        for key, wanted in _wanted(settings).items()
        if wanted.device == "cpu"
    ]


def _wanted(settings: EngineConfig) -> dict[str, OffloadOptimizerConfig | OffloadParamConfig]:
    zero = settings.zero_optimization
    return {
        "zero_optimization.offload_optimizer": zero.offload_optimizer,
        "zero_optimization.offload_param": zero.offload_param,
    }
