"""`initialize`: a model and a configuration become an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from dsgraph import compat
from dsgraph.partitioning.state import partition
from dsgraph.partitioning.table import partitioned_parts
from dsgraph.ranks.mesh import resolve_mesh
from dsgraph.utils.errors import ConfigError

from .activation_checkpointing import take_switches
from .config.engine_config import EngineConfig
from .config.pass_options import pass_options
from .config.read_config import load_config, read_config
from .config.sparse_layout import sparse_layout
from .data import RankLoader
from .engine import Engine
from .integrations.mpu import ModelParallel, data_parallel_mesh
from .monitoring.log import overruled, say, tell
from .monitoring.step_logger import Looks
from .on_meta import check_weights, give_values, is_on_meta
from .optimizers.by_name import (
    Binding,
    Groups,
    MakesOptimizer,
    check_compression,
    check_float32,
    maker_of,
    parameters_in,
    rebound,
)
from .optimizers.full_matrix import whole_where_needed
from .optimizers.offloading import check_offload, offload_notes, offloaded, partition_offload, planned
from .optimizers.step_moment import beside_notes
from .parallel_engine import check_divided, data_rank, divided_engine
from .rank_setup import device_of_rank, join_ranks, place_in
from .schedules.by_name import schedule_class
from .techniques.layer_drop import ProgressiveLayerDrop
from .techniques.quantize_training import QuantizedTraining

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | MakesOptimizer | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    mpu: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | PathLike[str] | Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    example: Any = None,
    weights: str | PathLike[str] | None = None,
) -> tuple[Any, Optimizer, RankLoader | None, Any]:
    """Partitions and compiles a model, and puts everything around it that a training step needs.

    A script for `deepspeed.initialize` runs with it: the configuration is DeepSpeed's, see docs/config.md.

    Args:
        args: What `add_config_arguments` has parsed; names the configuration where `config` does not.
        model: A plain model, on the CPU or on this rank's device; or on the meta device, then it gets values module by
            module, where the configuration says that they lie. It is changed in place.
        optimizer: An optimizer of the model's parameters that has not stepped, which is taken over to the shards; a
            function of parameters that makes one; None: as the configuration says.
        model_parameters: Which parameters the configured optimizer updates, as `torch.optim` takes them.
        training_data: A dataset, of which a loader of this rank's micro-batches is made.
        lr_scheduler: A scheduler of `optimizer`, or a function of the optimizer that makes one; None: as the
            configuration says.
        mpu: Tells, by Megatron's getters, which ranks share a model that its own code has sliced: ZeRO shards over
            `get_data_parallel_group()`, and norms count slices over `get_model_parallel_group()`.
        collate_fn: Makes a batch of samples of `training_data`.
        config: The path of a JSON file, or what would stand in it.
        mesh: As for `dsgraph.partition`.
        example: For the section `parallel` without `training_data`: one micro-batch, as the data gives it.
        weights: For a model on the meta device: a folder of `*.safetensors` from which its values come, see
            `dsgraph.materialize`; None: modules initialise themselves.

    Returns:
        The engine (`Engine`, or `PipelineEngine` with the section `parallel`), the optimizer, the loader (None without
        `training_data`) and the scheduler (None without one).

    Raises:
        ConfigError: The configuration or an argument cannot be taken; the model is as it was.
        PartitionError: See `partition`.
    """
    _check(model, optimizer, model_parameters)
    assert model is not None
    source = _source(args, config)
    join_ranks()
    device = device_of_rank()
    given_mesh, switches = mesh, take_switches()
    is_divided = bool(load_config(source).get("parallel"))
    check_weights(model, weights, is_divided=is_divided)
    if not is_on_meta(model):
        model.to(device)
    shared = None
    if mpu is not None:
        if is_divided or mesh is not None:
            raise ConfigError("initialize: mpu tells the ranks: leave mesh and the section parallel out")
        mesh, shared = data_parallel_mesh(mpu, device.type), ModelParallel.of(mpu, model)
    mesh = resolve_mesh(mesh, model)
    resolved = read_config(source, ranks=None if is_divided else mesh.size(), sections=switches)
    settings = resolved.config
    ranks, rank = mesh.size(), place_in(mesh)
    if is_divided:
        check_divided(settings, optimizer, model_parameters, given_mesh)
        ranks, rank = settings.parallel.dp, data_rank(settings)
    elif example is not None:
        raise ConfigError("initialize: example has an effect with the section parallel only: leave it out")
    settings, plan = planned(settings, model, device, ranks=ranks, is_divided=is_divided)
    resolved = replace(resolved, config=settings)
    mine, make = _optimizer_or_maker(optimizer, settings, model)
    make_schedule = _schedule_maker(lr_scheduler, settings, mine)
    loader = None
    if training_data is not None:
        loader = RankLoader(
            training_data,
            micro=resolved.batch.micro,
            ranks=ranks,
            rank=rank,
            collate_fn=collate_fn,
            drop_last=settings.dataloader_drop_last,
            num_workers=settings.dsgraph.num_workers,
        )
    without_effect = check_compression(settings, is_divided=is_divided) if optimizer is None else []
    say(
        resolved,
        [
            *overruled(optimizer, lr_scheduler, settings),
            *offload_notes(settings, device),
            *beside_notes(settings),
            *plan,
            *without_effect,
        ],
    )
    options = _backend_options(settings)
    if is_divided:
        divided = divided_engine(
            *(model, resolved),
            make=make,
            make_schedule=make_schedule,
            options=options,
            loader=loader,
            example=example,
        )
        return divided, divided.optimizer, loader, divided.lr_scheduler
    check_offload(settings, device)
    binding = Binding(model, model_parameters)
    if optimizer is None:
        check_float32(settings, binding.named(model))
    drop = None
    if settings.progressive_layer_drop.enabled:
        drop = ProgressiveLayerDrop(settings.progressive_layer_drop, model)
        tell(drop.note(compiles=settings.dsgraph.compile))
    moq = None
    if settings.quantize_training.enabled:
        moq = QuantizedTraining(settings, model)
        tell(moq.note())
    looks = Looks(resolved, device)
    with rebound(mine, model):
        partition(model, mesh, stage=settings.zero_optimization.stage, **_partition_options(settings))
        give_values(model, device, weights)
    if moq is not None:
        moq.take_over(partitioned_parts(model)[0])
    made = offloaded(whole_where_needed(mine or make(binding.groups(model))), settings)
    schedule = make_schedule(made)
    compiles = partial(torch.compile, backend=looks.graphs or "dsgraph", options=options, **compat.isolated())
    runs: Any = model
    if drop is not None:
        drop.take_over(compiles if settings.dsgraph.compile else None)
    elif settings.dsgraph.compile:
        runs = compiles(model)
    dtype = _dtype(settings)
    engine = Engine(
        *(model, runs, resolved, looks),
        optimizer=made,
        lr_scheduler=schedule,
        dtype=dtype,
        loader=loader,
        shared=shared,
        layer_drop=drop,
        quantized_training=moq,
    )
    return engine, made, loader, schedule


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags that name a configuration to a script's parser.

    Args:
        parser: The script's own.

    Returns:
        `parser` itself.
    """
    group = parser.add_argument_group("dsgraph", "the training engine")
    group.add_argument("--deepspeed", "--dsgraph", action="store_true", help="train with the engine")
    group.add_argument("--deepspeed_config", "--dsgraph_config", metavar="FILE", help="the engine's JSON configuration")
    return parser


def _check(model: object, optimizer: object, model_parameters: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize: model is {type(model).__name__}; it takes a torch.nn.Module")
    if isinstance(optimizer, Optimizer) and model_parameters is not None:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(id(param) not in held for param in parameters_in(model_parameters)):
            raise ConfigError("initialize: model_parameters holds what the optimizer does not update: leave it out")


def _source(args: Any, config: Any) -> Any:
    named = getattr(args, "deepspeed_config", None) or getattr(args, "dsgraph_config", None)
    if config is not None and named is not None:
        raise ConfigError(f"initialize: two configurations, config= and {named!r} of args: leave one out")
    if config is None and named is None:
        raise ConfigError("initialize: no configuration: pass config=, or --deepspeed_config FILE in args")
    return named if config is None else config


def _dtype(settings: EngineConfig) -> torch.dtype | None:
    if settings.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if settings.bf16.enabled else None


def _partition_options(settings: EngineConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"param_dtype": _dtype(settings)}
    if found["param_dtype"] is not None:
        found["cast_forward_inputs"] = False  # the engine casts them, before the compiled model
    if settings.communication_data_type is not None:
        found["reduce_dtype"] = _DTYPES[settings.communication_data_type]
    threshold = settings.zero_optimization.param_persistence_threshold
    if threshold is not None:
        found["keep_whole_below"] = threshold
    offload = partition_offload(settings)
    if offload is not None:
        found["offload"] = offload
    return found


def _backend_options(settings: EngineConfig) -> dict[str, Any]:
    own = settings.dsgraph
    found: dict[str, Any] = {"codegen": own.codegen, "strict": own.strict}
    if own.memory_limit is not None:
        found["memory_limit"] = own.memory_limit
    if settings.activation_checkpointing.cpu_checkpointing:
        found["activation_offload"] = "host"
    if own.kernels != "auto":
        found["kernels"] = own.kernels
    if settings.sparse_attention is not None:
        found["sparse_attention"] = sparse_layout(settings)
    return {**found, **pass_options(settings, _dtype(settings) or torch.float32)}


def _optimizer_or_maker(
    given: Any, settings: EngineConfig, model: nn.Module
) -> tuple[Optimizer | None, MakesOptimizer]:
    if isinstance(given, Optimizer):
        return given, lambda _: given
    if given is not None:
        return None, partial(_call, given)
    if settings.optimizer is None:
        raise ConfigError("initialize: no optimizer: pass one, or set optimizer.type in the configuration")
    return None, maker_of(settings.optimizer, model)


def _call(make: Callable[[Groups], Any], groups: Groups) -> Optimizer:
    made = make(groups)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"initialize: optimizer gave a {type(made).__name__}; it is to make a torch.optim.Optimizer")
    return made


def _schedule_maker(given: Any, settings: EngineConfig, mine: Optimizer | None) -> Callable[[Optimizer], Any]:
    if given is not None:
        if isinstance(given, LRScheduler) and given.optimizer is not mine:
            raise ConfigError(
                f"initialize: lr_scheduler is a {type(given).__name__} of another optimizer than the engine's: pass a "
                "function that makes it of the optimizer, or that optimizer as well"
            )
        return (lambda _: given) if hasattr(given, "step") else given
    if settings.scheduler is None:
        return lambda _: None
    params = settings.scheduler.params
    return partial(schedule_class(settings.scheduler.type, params), **params)
