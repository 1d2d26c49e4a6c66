"""The five steps of `initialize`. Each takes the result of the step before.

    Arguments -> resolve_ranks -> ResolvedRanks -> resolve_config -> Resolved -> build_model -> BuiltModel
              -> build_optimizer -> BuiltOptimizer -> build_engine -> Engine

Errors of the configuration are raised before `build_model`, which changes the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import Dataset

from dsgraph.compat.dynamo import isolated
from dsgraph.optim.full_matrix import whole_where_needed
from dsgraph.optim.hooks import Groups
from dsgraph.optim.registry import MakesOptimizer
from dsgraph.parallel.pipeline.pipelined import PipelinedModel
from dsgraph.partitioning.partition import partition
from dsgraph.partitioning.state import partition_states
from dsgraph.ranks.mesh import resolve_mesh
from dsgraph.utils.errors import ConfigError

from .activation_checkpointing import take_switches
from .config.conditions import check_keys
from .config.engine_config import EngineConfig
from .config.options_of_config import backend_options, partition_options
from .config.read_config import ResolvedConfig, parallel_section, read_config
from .data import RankLoader
from .engine import Engine
from .integrations.mpu import ModelParallel, data_parallel_mesh
from .makers import Makers, resolve_makers
from .micro_batches import MicroBatches
from .monitoring.log import overruled, say
from .monitoring.step_logger import StepLogger
from .on_meta import check_weights, give_values, is_on_meta
from .optimizers.binding import Binding, rebound
from .optimizers.offloading import offload_notes, offloaded, planned
from .optimizers.optimizer_section import check_float32
from .optimizers.step_moment import beside_notes
from .parallel_batches import ParallelBatches
from .parallel_model import check_parallel_arguments, data_place, parallel_model, slice_model
from .pipeline_schedule import PipelineSchedule
from .rank_setup import device_of_rank, join_ranks, layout_meshes, place_in
from .saving import Checkpoints
from .techniques.layer_drop import ProgressiveLayerDrop
from .techniques.quantize_training import QuantizedTraining
from .training_state import TrainingState


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
class ResolvedRanks:
    """The ranks of an engine.

    Attributes:
        given: The arguments of `initialize`.
        device: The device of this rank.
        mesh: The ranks over which the model is partitioned.
        shared: The ranks that share a model which its own code has made tensor-parallel; None without `mpu`.
        has_stages: True with pipeline stages.
        tensor: The ranks that share each parameter; None without tensor parallelism, or with stages.
    """

    given: Arguments
    device: torch.device
    mesh: DeviceMesh
    shared: ModelParallel | None
    has_stages: bool
    tensor: DeviceMesh | None


@dataclass(frozen=True)
class Resolved:
    """The configuration for these ranks.

    Attributes:
        ranks: The ranks.
        config: The configuration, completed.
        options: The options of the backend.
        makers: How the optimizer and the scheduler are made.
        loader: The loader of this rank's micro-batches; None without training data.
        data_place: Number of this rank among the data-parallel ranks, and their number.
    """

    ranks: ResolvedRanks
    config: ResolvedConfig
    options: dict[str, Any]
    makers: Makers
    loader: RankLoader | None
    data_place: tuple[int, int]

    @property
    def settings(self) -> EngineConfig:
        """The sections of the configuration."""
        return self.config.config


@dataclass(frozen=True)
class BuiltModel:
    """A partitioned or parallel model, with what its training needs.

    Attributes:
        resolved: The configuration.
        module: The partitioned model; with pipeline stages this rank's part.
        groups: The parameters that the optimizer updates, as `torch.optim` takes them.
        logger: Observes each step.
        layer_drop: Leaves out blocks in training; None if the configuration does not ask for it.
        quantized: Quantizes weights in training; None if the configuration does not ask for it.
    """

    resolved: Resolved
    module: nn.Module | PipelinedModel
    groups: Groups
    logger: StepLogger
    layer_drop: ProgressiveLayerDrop | None = None
    quantized: QuantizedTraining | None = None


@dataclass(frozen=True)
class BuiltOptimizer:
    """A model and its optimizer.

    Attributes:
        built: The model.
        optimizer: The optimizer of its shards.
        schedule: Steps after the optimizer; None without a schedule.
    """

    built: BuiltModel
    optimizer: Optimizer
    schedule: Any


def resolve_ranks(given: Arguments) -> ResolvedRanks:
    """Find the device, the mesh and the role of this rank, and move the model to the device.

    Raises:
        ConfigError: The configuration is not valid JSON, or arguments contradict each other.
    """
    join_ranks()
    device = device_of_rank()
    layout = parallel_section(given.source)
    has_stages = layout is not None and layout.pp > 1
    check_weights(given.model, given.weights, is_parallel=layout is not None and layout.tp * layout.pp > 1)
    if not is_on_meta(given.model):
        given.model.to(device)
    mesh, shared, tensor = given.mesh, None, None
    if given.mpu is not None:
        if layout is not None or mesh is not None:
            raise ConfigError("initialize: `mpu=` already defines the process groups: remove mesh= and `parallel`")
        mesh, shared = data_parallel_mesh(given.mpu, device.type), ModelParallel.of(given.mpu, given.model)
    elif layout is not None and not has_stages:
        mesh, tensor = layout_meshes(layout, device)
    return ResolvedRanks(given, device, resolve_mesh(mesh, given.model), shared, has_stages, tensor)


def resolve_config(ranks: ResolvedRanks) -> Resolved:
    """Read and complete the configuration, and print the result on the first rank.

    Raises:
        ConfigError: The configuration or an argument is not supported; the message names it.
    """
    given = ranks.given
    size = None if ranks.has_stages else ranks.mesh.size()
    config = read_config(given.source, ranks=size, device=ranks.device.type, sections=take_switches())
    place = data_place(config.config) if ranks.has_stages else (place_in(ranks.mesh), ranks.mesh.size())
    if config.config.is_parallel:
        check_parallel_arguments(config.config, given.optimizer, given.model_parameters, given.mesh)
    elif given.example is not None:
        raise ConfigError("initialize: example= has an effect only with the section `parallel`: remove it")
    settings, plan = planned(config.config, given.model, ranks.device, ranks=place[1])
    lines = dict.fromkeys([*config.notes, *check_keys(settings, ranks.device.type)])
    config, options = replace(config, config=settings, notes=tuple(lines)), backend_options(settings)
    makers = resolve_makers(given.optimizer, given.lr_scheduler, settings, given.model)
    loader = RankLoader.of(given.training_data, config, place, given.collate_fn)
    notes = [*overruled(given.optimizer, given.lr_scheduler, settings), *offload_notes(settings, ranks.device)]
    say(config, [*notes, *beside_notes(settings), *plan, *makers.notes])
    return Resolved(ranks, config, options, makers, loader, place)


def build_model(resolved: Resolved) -> BuiltModel:
    """Partition the model, in place, and prepare the training techniques of the configuration.

    Raises:
        ConfigError: The configuration does not fit the model; the model is unchanged.
        PartitionError: See `partition`.
    """
    ranks, given, settings = resolved.ranks, resolved.ranks.given, resolved.settings
    model = given.model
    if ranks.has_stages:
        return _build_parallel_model(resolved)
    if any(part.ignored for part in partition_states(model)):
        raise ConfigError("initialize: an engine would not clip the ignored_params of this model: write your own loop")
    binding = Binding(model, given.model_parameters)
    if given.optimizer is None:
        check_float32(settings, binding.named(model))
    layer_drop = ProgressiveLayerDrop.of(settings, model)
    quantized = QuantizedTraining.of(settings, model)
    logger = StepLogger(resolved.config, ranks.device)
    with rebound(resolved.makers.given, model):
        if ranks.tensor is not None:
            slice_model(model, ranks.tensor, resolved.config, loader=resolved.loader, example=given.example)
        partition(model, ranks.mesh, **partition_options(settings))
        give_values(model, ranks.device, given.weights)
    if quantized is not None:
        quantized.take_over(partition_states(model)[0])
    return BuiltModel(resolved, model, binding.groups(model), logger, layer_drop, quantized)


def _build_parallel_model(resolved: Resolved) -> BuiltModel:
    given, settings = resolved.ranks.given, resolved.settings
    if given.optimizer is None:
        check_float32(settings, Binding(given.model, None).named(given.model))
    layer_drop = ProgressiveLayerDrop.of(settings, given.model)
    quantized = QuantizedTraining.of(settings, given.model)
    logger = StepLogger(resolved.config, resolved.ranks.device)
    parts = parallel_model(
        given.model,
        resolved.config,
        options=resolved.options,
        loader=resolved.loader,
        example=given.example,
        drops=() if layer_drop is None else layer_drop.in_stages(),
    )
    if parts.shards is not None:
        resolved = replace(resolved, makers=resolved.makers.over(parts.shards))
        if quantized is not None:
            quantized.take_over(partition_states(parts.shards)[0], parts.checkpoint_tensors().slices)
    groups: Groups = [{"params": [param for param in parts.parameters() if param.requires_grad]}]
    return BuiltModel(resolved, parts, groups, logger, layer_drop, quantized)


def build_optimizer(built: BuiltModel) -> BuiltOptimizer:
    """Make the optimizer, wrapped if it needs full matrices or is offloaded, and its scheduler."""
    makers = built.resolved.makers
    made = makers.given or makers.optimizer(built.groups)
    optimizer = offloaded(whole_where_needed(made), built.resolved.settings) if made.param_groups else made
    return BuiltOptimizer(built, optimizer, makers.schedule(optimizer))


def build_engine(made: BuiltOptimizer) -> Engine:
    """Compile the model, and put the engine around it."""
    built, resolved = made.built, made.built.resolved
    state = TrainingState(
        module=built.module,
        optimizer=made.optimizer,
        resolved=resolved.config,
        lr_scheduler=made.schedule,
        loader=resolved.loader,
        layer_drop=built.layer_drop,
        quantized=built.quantized,
        shared=resolved.ranks.shared,
        data_place=resolved.data_place,
    )
    if isinstance(built.module, PipelinedModel):
        strategy = PipelineSchedule(built.module, state, built.logger)
        return Engine(state, strategy, built.logger, Checkpoints(state))
    state.loss_groups = tuple(axis.group for axis in state.partition.axes)
    dtype, device = resolved.settings.compute_dtype, resolved.ranks.device
    kind = ParallelBatches if resolved.settings.is_parallel else MicroBatches
    batches = kind(_compiled(built, built.module), state, built.logger, device=device, dtype=dtype)
    return Engine(state, batches, built.logger, Checkpoints(state))


def _compiled(built: BuiltModel, model: nn.Module) -> Callable[..., Any]:
    """Return the function that runs the model: compiled, or itself."""
    may_compile = built.layer_drop is None or built.layer_drop.take_over(model)
    if not may_compile or not built.resolved.settings.dsgraph.compile:
        return model
    backend, options = built.logger.graphs or "dsgraph", built.resolved.options
    how: dict[str, Any] = {"backend": backend, "options": options, **isolated()}
    return torch.compile(model, **how)
