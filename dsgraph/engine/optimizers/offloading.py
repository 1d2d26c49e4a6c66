"""The configuration's `offload_optimizer` and `offload_param`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dsgraph.engine.config.engine_config import EngineConfig
from dsgraph.engine.config.zero_config import OffloadOptimizerConfig, OffloadParamConfig
from dsgraph.optim.hooks import is_elementwise
from dsgraph.optim.offload_optimizer import offloaded_to
from dsgraph.optim.plan_offload import plan_offload
from dsgraph.partitioning.arguments import OffloadArguments
from dsgraph.partitioning.rows import own_part
from dsgraph.utils.byte_counts import on_device
from dsgraph.utils.errors import ConfigError, OffloadError


def planned(
    settings: EngineConfig, model: nn.Module, device: torch.device, *, ranks: int
) -> tuple[EngineConfig, list[str]]:
    """Return the settings with the offload that the model needs, and lines about it to print.

    `dsgraph.offload_folder` enables it on the CPU, and `dsgraph.host_memory_limit` on CUDA. Half of
    `dsgraph.memory_limit` is for the model's states, the other half is left for activations.

    Raises:
        ConfigError: The model does not fit.
    """
    own, zero = settings.dsgraph, settings.zero_optimization
    if own.memory_limit is None or (own.offload_folder is None and own.host_memory_limit is None):
        return settings, []
    is_host = device.type != "cpu"
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
            f"dsgraph.memory_limit is {limit:,} bytes, and half of it is for the model's states, so that it must be "
            f"at least twice their size: {error}"
        ) from error
    where: dict[str, Any] = {"device": "cpu"} if is_host else {"device": "nvme", "nvme_path": own.offload_folder}
    changes: dict[str, Any] = {}
    if plan.optimizer_ratio:
        changes["offload_optimizer"] = OffloadOptimizerConfig(**where, ratio=plan.optimizer_ratio)
    if plan.parameters_ratio:
        changes["offload_param"] = OffloadParamConfig(**where, ratio=plan.parameters_ratio)
    limits = {"memory_limit": plan.limit_of_graphs(limit), "offload_folder": None, "host_memory_limit": None}
    update = {"zero_optimization": zero.model_copy(update=changes), "dsgraph": own.model_copy(update=limits)}
    return settings.model_copy(update=update), [str(plan)]


def offloaded(optimizer: Optimizer, settings: EngineConfig) -> Optimizer:
    """Return the optimizer itself, or a wrapper that offloads its state.

    Raises:
        OffloadError: The state of such an optimizer cannot be offloaded, or the disk has too few bytes free.
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
    """Return the lines that are printed about offload."""
    optimizer = settings.zero_optimization.offload_optimizer
    param = settings.zero_optimization.offload_param
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
    return notes
