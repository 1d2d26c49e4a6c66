"""The steps of `initialize`: ranks, configuration, optimizer, model, engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import Dataset

from dsgraph.compat.dynamo import isolated
from dsgraph.optim.full_matrix import whole_where_needed
from dsgraph.optim.registry import MakesOptimizer
from dsgraph.partitioning.partition import partition
from dsgraph.partitioning.state import partition_states
from dsgraph.ranks.first_rank import tell
from dsgraph.ranks.mesh import resolve_mesh
from dsgraph.utils.errors import ConfigError

from .activation_checkpointing import take_switches
from .config.conditions import check_keys
from .config.engine_config import EngineConfig
from .config.options import backend_options, partition_options
from .config.read_config import ResolvedConfig, load_config, read_config
from .data import RankLoader
from .engine import Engine
from .integrations.mpu import ModelParallel, data_parallel_mesh
from .makers import Makers
from .monitoring.log import overruled, say
from .monitoring.step_logger import Looks
from .on_meta import check_weights, give_values, is_on_meta
from .optimizers.binding import Binding, rebound
from .optimizers.offloading import offload_notes, offloaded, planned
from .optimizers.section import check_float32
from .optimizers.step_moment import beside_notes
from .parallel_engine import check_divided, data_rank, divided_engine
from .pipeline_engine import PipelineEngine
from .rank_setup import device_of_rank, join_ranks, place_in
from .techniques.layer_drop import ProgressiveLayerDrop
from .techniques.quantize_training import QuantizedTraining


@dataclass(frozen=True)
class Arguments:
    """The arguments of `initialize`; `source` is the configuration, from `config` or `args`."""

    model: nn.Module
    source: Any
    optimizer: Optimizer | MakesOptimizer | None
    model_parameters: Any
    training_data: Dataset[Any] | None
    lr_scheduler: Any
    mpu: Any
    collate_fn: Callable[..., Any] | None
    mesh: DeviceMesh | None
    example: Any
    weights: str | PathLike[str] | None


@dataclass(frozen=True)
class Ranks:
    """The ranks of an engine.

    Attributes:
        device: The device of this rank.
        mesh: The ranks over which the model is partitioned.
        shared: The ranks that share a model which its own code has sliced; None without `mpu`.
        is_parallel: True with the section `parallel`: several ranks hold one copy of the model.
    """

    device: torch.device
    mesh: DeviceMesh
    shared: ModelParallel | None
    is_parallel: bool


@dataclass(frozen=True)
class Resolved:
    """The configuration for these ranks.

    Attributes:
        config: The configuration, completed.
        data_ranks: Number of ranks with different data.
        data_rank: The number of this rank among them.
        plan: What was planned for the offload, in lines.
        options: The options of the backend.
    """

    config: ResolvedConfig
    data_ranks: int
    data_rank: int
    plan: list[str]
    options: dict[str, Any]

    @property
    def settings(self) -> EngineConfig:
        """The sections of the configuration."""
        return self.config.config


@dataclass(frozen=True)
class BuiltModel:
    """A partitioned model, with what runs it.

    Attributes:
        binding: The parameters that the optimizer updates.
        logger: Observes each step.
        layer_drop: Leaves out blocks in training; None if the configuration does not ask for it.
        quantized: Quantizes weights in training; None if the configuration does not ask for it.
    """

    binding: Binding
    logger: Looks
    layer_drop: ProgressiveLayerDrop | None
    quantized: QuantizedTraining | None


def resolve_ranks(given: Arguments) -> Ranks:
    """Find the device, the mesh and the role of this rank, and move the model to the device.

    Raises:
        ConfigError: The configuration is not valid JSON, or arguments contradict each other.
    """
    join_ranks()
    device = device_of_rank()
    is_parallel = bool(load_config(given.source).get("parallel"))
    check_weights(given.model, given.weights, is_divided=is_parallel)
    if not is_on_meta(given.model):
        given.model.to(device)
    mesh, shared = given.mesh, None
    if given.mpu is not None:
        if is_parallel or mesh is not None:
            raise ConfigError("initialize: `mpu=` already defines the process groups: remove mesh= and `parallel`")
        mesh, shared = data_parallel_mesh(given.mpu, device.type), ModelParallel.of(given.mpu, given.model)
    return Ranks(device, resolve_mesh(mesh, given.model), shared, is_parallel)


def resolve_config(given: Arguments, ranks: Ranks) -> Resolved:
    """Read and complete the configuration.

    Raises:
        ConfigError: The configuration or an argument is not supported; the message names it.
    """
    size = None if ranks.is_parallel else ranks.mesh.size()
    config = read_config(given.source, ranks=size, device=ranks.device.type, sections=take_switches())
    count, number = ranks.mesh.size(), place_in(ranks.mesh)
    if ranks.is_parallel:
        check_divided(config.config, given.optimizer, given.model_parameters, given.mesh)
        count, number = config.config.parallel.dp, data_rank(config.config)
    elif given.example is not None:
        raise ConfigError("initialize: example= has an effect only with the section `parallel`: remove it")
    settings, plan = planned(config.config, given.model, ranks.device, ranks=count)
    notes = dict.fromkeys([*config.notes, *check_keys(settings, ranks.device.type)])
    return Resolved(
        replace(config, config=settings, notes=tuple(notes)), count, number, plan, backend_options(settings)
    )


def build_loader(given: Arguments, resolved: Resolved) -> RankLoader | None:
    """Return the loader of this rank's micro-batches; None without training data."""
    if given.training_data is None:
        return None
    return RankLoader(
        given.training_data,
        micro=resolved.config.batch.micro,
        ranks=resolved.data_ranks,
        rank=resolved.data_rank,
        collate_fn=given.collate_fn,
        drop_last=resolved.settings.dataloader_drop_last,
        num_workers=resolved.settings.dsgraph.num_workers,
    )


def print_notes(given: Arguments, ranks: Ranks, resolved: Resolved, makers: Makers) -> None:
    """Print what the configuration comes to, and keys without effect, on the first rank."""
    settings = resolved.settings
    notes = [*overruled(given.optimizer, given.lr_scheduler, settings), *offload_notes(settings, ranks.device)]
    say(resolved.config, [*notes, *beside_notes(settings), *resolved.plan, *makers.notes])


def build_parallel_engine(
    given: Arguments, resolved: Resolved, makers: Makers, loader: RankLoader | None
) -> PipelineEngine:
    """Build the engine of a model that several ranks hold together, as the section `parallel` says."""
    return divided_engine(
        given.model,
        resolved.config,
        make=makers.optimizer,
        make_schedule=makers.schedule,
        options=resolved.options,
        loader=loader,
        example=given.example,
    )


def build_model(given: Arguments, ranks: Ranks, resolved: Resolved, makers: Makers) -> BuiltModel:
    """Partition the model, in place, and prepare the training techniques of the configuration.

    Raises:
        ConfigError: The configuration does not fit the model; the model is unchanged.
        PartitionError: See `partition`.
    """
    model, settings = given.model, resolved.settings
    binding = Binding(model, given.model_parameters)
    if given.optimizer is None:
        check_float32(settings, binding.named(model))
    layer_drop, quantized = None, None
    if settings.progressive_layer_drop.enabled:
        layer_drop = ProgressiveLayerDrop(settings.progressive_layer_drop, model)
        tell(layer_drop.note(compiles=settings.dsgraph.compile))
    if settings.quantize_training.enabled:
        quantized = QuantizedTraining(settings, model)
        tell(quantized.note())
    logger = Looks(resolved.config, ranks.device)
    with rebound(makers.given, model):
        partition(model, ranks.mesh, **partition_options(settings))
        give_values(model, ranks.device, given.weights)
    if quantized is not None:
        quantized.take_over(partition_states(model)[0])
    return BuiltModel(binding, logger, layer_drop, quantized)


def build_optimizer(given: Arguments, resolved: Resolved, makers: Makers, built: BuiltModel) -> Optimizer:
    """Make the optimizer of the shards, wrapped if it needs full matrices or is offloaded."""
    made = makers.given or makers.optimizer(built.binding.groups(given.model))
    return offloaded(whole_where_needed(made), resolved.settings)


def build_engine(
    given: Arguments,
    ranks: Ranks,
    resolved: Resolved,
    built: BuiltModel,
    *,
    optimizer: Optimizer,
    schedule: Any,
    loader: RankLoader | None,
) -> Engine:
    """Compile the model, and put the engine around it."""
    settings = resolved.settings
    compiles = partial(
        torch.compile,
        backend=built.logger.graphs or "dsgraph",
        options=resolved.options,
        **isolated(),
    )
    runs: Any = given.model
    if built.layer_drop is not None:
        built.layer_drop.take_over(compiles if settings.dsgraph.compile else None)
    elif settings.dsgraph.compile:
        runs = compiles(given.model)
    return Engine(
        *(given.model, runs, resolved.config, built.logger),
        optimizer=optimizer,
        lr_scheduler=schedule,
        dtype=settings.compute_dtype,
        loader=loader,
        shared=ranks.shared,
        layer_drop=built.layer_drop,
        quantized_training=built.quantized,
    )
