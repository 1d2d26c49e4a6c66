"""`initialize`: a model and a configuration become an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import Dataset

from dsgraph.optim.registry import MakesOptimizer
from dsgraph.utils.errors import ConfigError

from .build import Arguments, build_engine, build_model, build_optimizer, resolve_config, resolve_ranks
from .data import RankLoader
from .engine import Engine
from .optimizers.binding import parameters_in


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
) -> tuple[Engine, Optimizer, RankLoader | None, Any]:
    """Create the engine of a model: partition and compile it, with everything that a training step needs.

    A script for `deepspeed.initialize` runs with it: the configuration is DeepSpeed's, see docs/reference/config.md.

    Args:
        args: Arguments parsed with `add_config_arguments`; they name the configuration if `config` is None.
        model: A plain model, on the CPU or on this rank's device. A model on the meta device gets values module by
            module, on the device or disk that the configuration names. It is changed in place.
        optimizer: An optimizer of the model's parameters that has not stepped, which will step the shards; a function
            of parameters that makes one; None: the configuration's.
        model_parameters: The parameters that the configured optimizer updates, as for `torch.optim`.
        training_data: A dataset, for the loader of this rank's micro-batches.
        lr_scheduler: A scheduler of `optimizer`, or a function of the optimizer that makes one; None: the
            configuration's.
        mpu: An object with Megatron's getters, for a model that its own code has made tensor-parallel: ZeRO shards over
            `get_data_parallel_group()`, and norms are summed over `get_model_parallel_group()`.
        collate_fn: Makes a batch of samples of `training_data`.
        config: The path of a JSON file, or its content as a dict.
        mesh: As for `dsgraph.partition`.
        example: For the section `parallel` without `training_data`: one micro-batch like those of the data.
        weights: For a model on the meta device: a folder of `*.safetensors` from which its values come, see
            `dsgraph.materialize`; None: modules initialise themselves.

    Returns:
        The engine, the optimizer, the loader (None without `training_data`) and the scheduler (None without one).

    Raises:
        ConfigError: The configuration or an argument is not supported; the model is unchanged.
        PartitionError: See `partition`.
    """
    _check(model, optimizer, model_parameters)
    assert model is not None
    given = Arguments(
        model=model,
        source=_source(args, config),
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        mesh=mesh,
        example=example,
        weights=weights,
    )
    resolved = resolve_config(resolve_ranks(given))
    engine = build_engine(build_optimizer(build_model(resolved)))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that name a configuration to a script's parser.

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
