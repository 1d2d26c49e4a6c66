"""The configuration's `offload_optimizer` and `offload_param`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.offload_config import OffloadOptimizerConfig, OffloadParamConfig
from dsgraph.optim.hooks import is_elementwise
from dsgraph.optim.offload_optimizer import offloaded_to
from dsgraph.optim.plan_offload import plan_offload
from dsgraph.partitioning.rows import own_part
from dsgraph.partitioning.table import OffloadArguments
from dsgraph.utils.byte_counts import on_device
from dsgraph.utils.errors import ConfigError, OffloadError


def check_offload(settings: EngineConfig, device: torch.device) -> None:
    """Refuses what could not be done, before anything is changed.

    Raises:
        ConfigError: No folder for the disk, a device from which nothing goes there yet, or a key without its partner.
    """
    zero = settings.zero_optimization
    for key, wanted in _wanted(settings).items():
        if wanted.device == "nvme" and wanted.nvme_path is None:
            raise ConfigError(f"{key}.device is 'nvme': set {key}.nvme_path to a folder on that disk")
        if wanted.device != "nvme" and wanted.nvme_path is not None:
            raise ConfigError(f"{key}.nvme_path has no effect with device {wanted.device!r}: set it to 'nvme'")
        if wanted.device == "none" and wanted.ratio != 1:
            raise ConfigError(f"{key}.ratio has no effect with device 'none': it is of what lies elsewhere")
        if wanted.device == "nvme" and device.type != "cpu":
            raise ConfigError(f"{key}.device: from {device.type} to disk is not there yet: set it to 'cpu' or 'none'")
        if wanted.device == "cpu" and device.type != "cpu" and isinstance(wanted, OffloadParamConfig):
            raise ConfigError(
                f"{key}.device: parameters cannot lie on the host below {device.type} yet: set it to 'none'"
            )
        if wanted.device != "none" and isinstance(wanted, OffloadParamConfig) and zero.stage != 3:
            raise ConfigError(f"{key}: stage {zero.stage} keeps parameters where they are used: set the stage to 3")
    optimizer = zero.offload_optimizer
    if optimizer.pin_memory is not None and optimizer.device == "none":
        raise ConfigError(
            "zero_optimization.offload_optimizer.pin_memory has no effect with device 'none': leave it out"
        )
    if settings.dsgraph.delayed_update and (optimizer.device != "cpu" or optimizer.ratio != 1):
        raise ConfigError(
            "dsgraph.delayed_update: an update is delayed where all of the state is on the host: set "
            "zero_optimization.offload_optimizer.device to 'cpu' and leave its ratio out"
        )


def planned(
    settings: EngineConfig, model: nn.Module, device: torch.device, *, ranks: int, is_divided: bool
) -> tuple[EngineConfig, list[str]]:
    """The settings with what has to lie elsewhere, and what is printed of it.

    `dsgraph.offload_folder` asks for that on the CPU, and `dsgraph.host_memory_limit` on CUDA. Half of
    `dsgraph.memory_limit` is for the model's states, the other half is left to activations.

    Raises:
        ConfigError: The model does not fit, there is no limit, a section says already what lies where, or the key is
            one of another device.
    """
    own, zero = settings.dsgraph, settings.zero_optimization
    if own.delayed_update and is_divided:
        raise ConfigError("dsgraph.delayed_update: it is not there yet beside the section parallel: remove one of them")
    if own.offload_folder is None and own.host_memory_limit is None:
        return settings, []
    is_host = device.type != "cpu"
    asks, other = ("host_memory_limit", "offload_folder") if is_host else ("offload_folder", "host_memory_limit")
    if getattr(own, other) is not None:
        below = "the host's memory" if is_host else "the disk"
        raise ConfigError(
            f"dsgraph.{other} has no effect for a model on {device.type}, below which lies {below}: remove it, and set "
            f"dsgraph.{asks}"
        )
    if own.memory_limit is None:
        raise ConfigError(f"dsgraph.{asks} has no effect without a limit: set dsgraph.memory_limit as well")
    chosen = [key for key, wanted in _wanted(settings).items() if wanted.device != "none"]
    if chosen or is_divided:
        beside = chosen[0] if chosen else "the section parallel"
        raise ConfigError(f"dsgraph.{asks} beside {beside}: remove one of the two")
    limit = on_device(own.memory_limit, device.type)
    threshold = zero.param_persistence_threshold
    try:
        plan = plan_offload(
            model,
            memory_limit=limit // 2,
            folder=own.offload_folder,
            host_memory_limit=own.host_memory_limit,
            device=device,
            stage=zero.stage,
            ranks=ranks,
            **({} if threshold is None else {"keep_whole_below": threshold}),
        )
    except OffloadError as error:
        raise ConfigError(
            f"dsgraph.memory_limit is {limit:,} bytes, of which half is for the model's states, so that it takes "
            f"twice as much as they do: {error}"
        ) from error
    where: dict[str, Any] = {"device": "cpu"} if is_host else {"device": "nvme", "nvme_path": own.offload_folder}
    changes: dict[str, Any] = {}
    if plan.optimizer_ratio:
        changes["offload_optimizer"] = OffloadOptimizerConfig(**where, ratio=plan.optimizer_ratio)
    if plan.parameters_ratio:
        changes["offload_param"] = OffloadParamConfig(**where, ratio=plan.parameters_ratio)
    update = {
        "zero_optimization": zero.model_copy(update=changes),
        "dsgraph": own.model_copy(update={"memory_limit": plan.limit_of_graphs(limit)}),
    }
    return settings.model_copy(update=update), [str(plan)]


def partition_offload(settings: EngineConfig) -> dict[str, Any] | None:
    """What `partition` is told of it; see `offloaded` as well, since each may have a folder of its own."""
    optimizer, param = _wanted(settings).values()
    named = {"optimizer": (optimizer, {"nvme": "disk", "cpu": "host"}), "parameters": (param, {"nvme": "disk"})}
    tiers = {what: tiers[wanted.device] for what, (wanted, tiers) in named.items() if wanted.device in tiers}
    if not tiers:
        return None
    ratio = {what: named[what][0].ratio for what in tiers}
    folder = param.nvme_path if "parameters" in tiers else optimizer.nvme_path
    return {**tiers, "ratio": ratio, **({} if folder is None else {"folder": folder})}


def offloaded(optimizer: Optimizer, settings: EngineConfig) -> Optimizer:
    """The optimizer itself, or, if its state is to lie elsewhere, what runs it so.

    Raises:
        OffloadError: It is no optimizer whose state can lie there, or the disk has too few bytes free.
    """
    wanted = settings.zero_optimization.offload_optimizer
    if wanted.device == "none":
        return optimizer
    if wanted.device == "cpu" and not settings.dsgraph.delayed_update and _is_there_anyway(optimizer):
        for each in _all_of(optimizer):
            vars(each)["tier"] = "host"  # read by the step of a partitioned model
        return optimizer
    arguments = OffloadArguments(
        optimizer="disk" if wanted.device == "nvme" else "host",
        folder=wanted.nvme_path or "",
        optimizer_ratio=wanted.ratio,
    )
    pins = wanted.pin_memory is not False
    return offloaded_to(arguments, optimizer, delayed=settings.dsgraph.delayed_update, pin_memory=pins)


def _is_there_anyway(optimizer: Optimizer) -> bool:
    """Return True if an optimizer that is not elementwise has its state on the host already and needs no masters."""
    params = [own_part(param) for group in optimizer.param_groups for param in group["params"]]
    on_host = all(param.device.type == "cpu" and param.dtype.itemsize > 2 for param in params)
    return on_host and not is_elementwise(optimizer)


def _all_of(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield the optimizer and the optimizers that it steps."""
    yield optimizer
    for value in vars(optimizer).values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Optimizer):
                yield from _all_of(each)


def offload_notes(settings: EngineConfig, device: torch.device) -> list[str]:
    """What is printed of it."""
    optimizer, param = _wanted(settings).values()
    notes = []
    if optimizer.device == "cpu" and device.type == "cpu":
        notes.append(
            "zero_optimization.offload_optimizer moves nothing: the model is trained on the CPU, where the state lies "
            "anyway; parameters of 16 bits have masters of float32"
        )
    if param.device == "cpu" and device.type == "cpu":
        notes.append(
            "zero_optimization.offload_param has no effect: the model is trained on the CPU, and all of it is there"
        )
    buffers = [key for key in ("buffer_count", "buffer_size") if getattr(param, key) is not None]
    if param.device != "nvme":
        notes += [
            f"zero_optimization.offload_param.{key} has no effect with device {param.device!r}: nothing is read"
            for key in buffers
        ]
    if isinstance(optimizer, OffloadOptimizerConfig) and optimizer.pin_memory is not None and device.type == "cpu":
        notes.append("zero_optimization.offload_optimizer.pin_memory has no effect: nothing is copied to or from CUDA")
    return notes


def _wanted(settings: EngineConfig) -> dict[str, OffloadOptimizerConfig | OffloadParamConfig]:
    zero = settings.zero_optimization
    return {
        "zero_optimization.offload_optimizer": zero.offload_optimizer,
        "zero_optimization.offload_param": zero.offload_param,
    }
