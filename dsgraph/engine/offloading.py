"""The configuration's `offload_optimizer` and `offload_param`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim import Optimizer

from dsgraph.errors import ConfigError
from dsgraph.offload.optimizer import OptimizerOnDisk

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
        if wanted.device != "none" and device.type != "cpu":
            raise ConfigError(f"{key}: offloading from {device.type} is not there yet: remove the key")
    if zero.offload_optimizer.ratio != 1 and zero.offload_optimizer.device != "nvme":
        raise ConfigError(
            "zero_optimization.offload_optimizer.ratio has no effect with device "
            f"{zero.offload_optimizer.device!r}: it is of what lies on disk"
        )
    if zero.offload_param.device == "nvme" and zero.stage != 3:
        raise ConfigError(
            f"zero_optimization.offload_param: stage {zero.stage} keeps parameters in memory: set the stage to 3"
        )


def partition_offload(settings: EngineConfig) -> dict[str, str] | None:
    """What `partition` is told of it."""
    wanted = settings.zero_optimization.offload_param
    if wanted.device != "nvme":
        return None
    assert wanted.nvme_path is not None
    return {"parameters": "disk", "folder": wanted.nvme_path}


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
