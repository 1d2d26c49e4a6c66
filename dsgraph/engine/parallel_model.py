"""`initialize` with the section `parallel`: a model becomes this rank's stages and slices, or its slices alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh
from torch.optim import Optimizer

from dsgraph.batches import as_arguments
from dsgraph.optim.registry import entry_of
from dsgraph.parallel.parallelize import one_of, parallelize
from dsgraph.parallel.pipeline.pipelined import PipelinedModel
from dsgraph.parallel.pipeline.stage_chain import Techniques
from dsgraph.parallel.tensor.tensor_parallel import tensor_parallel
from dsgraph.partitioning.forward_inputs import move_inputs
from dsgraph.utils.errors import ConfigError

from .config.engine_config import EngineConfig
from .config.options_of_config import partition_options
from .config.read_config import ResolvedConfig
from .data import RankLoader


def parallel_model(
    model: nn.Module,
    resolved: ResolvedConfig,
    *,
    options: Mapping[str, Any],
    loader: RankLoader | None,
    example: Any,
    drops: tuple[str, ...],
) -> PipelinedModel:
    """Split a model as the section `parallel` says, and return this rank's part.

    Args:
        model: Unmodified.
        resolved: The configuration.
        options: Options of the backend, which compiles the stages.
        loader: Loader of the training data.
        example: One micro-batch; None: the first samples of the loader's dataset.
        drops: Paths of blocks that may be left out.

    Raises:
        ConfigError: There is no example.
        OptionError: See `parallelize`.
        PartitionError: See `parallelize`.
    """
    config = resolved.config
    layout = config.parallel
    args, kwargs = _example(loader, resolved, example)
    if config.dsgraph.memory_limit is not None and not config.dsgraph.compile:
        raise ConfigError(
            "dsgraph.memory_limit is kept by compiled stages, and dsgraph.compile is false: remove one of the two"
        )
    return parallelize(
        model,
        args,
        example_kwargs=kwargs,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        zero_stage=config.zero_optimization.stage,
        microbatches=resolved.batch.micro_batches,
        schedule=layout.schedule,
        split=layout.split,
        keep_whole_below=config.zero_optimization.param_persistence_threshold,
        param_dtype=config.compute_dtype,
        reduce_dtype=partition_options(config).get("reduce_dtype"),
        options=dict(options) if config.dsgraph.compile else None,
        techniques=_techniques(config, drops),
    )


def slice_model(
    model: nn.Module, mesh: DeviceMesh, resolved: ResolvedConfig, *, loader: RankLoader | None, example: Any
) -> None:
    """Make a model tensor-parallel over the ranks of `mesh`, in place; arguments as for `parallel_model`.

    Raises:
        ConfigError: There is no example.
        OptionError: The example has positional and named arguments.
        PartitionError: See `tensor_parallel`.
    """
    inputs = one_of(*_example(loader, resolved, example))
    device = next(iter(model.parameters())).device
    tensor_parallel(model, mesh, example_inputs=move_inputs(inputs, device))


def _example(
    loader: RankLoader | None, resolved: ResolvedConfig, example: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model for one micro-batch."""
    return as_arguments(_first_of(loader, resolved.batch.micro) if example is None else example)


def _first_of(loader: RankLoader | None, count: int) -> Any:
    if loader is None:
        raise ConfigError("initialize: the section parallel needs training_data, or example=, one micro-batch")
    assert loader.collate_fn is not None
    return loader.collate_fn([loader.dataset[at % len(loader.dataset)] for at in range(count)])  # type: ignore[arg-type]


def _techniques(config: EngineConfig, drops: tuple[str, ...]) -> Techniques:
    one_bit = config.optimizer is not None and bool(entry_of(config.optimizer.type).warms_up_as)
    offload = dict(partition_options(config).get("offload", {}))
    offload.pop("optimizer", None)  # the engine wraps the optimizer
    return Techniques(
        transforms=one_bit or config.quantize_training.enabled,
        offload=offload if "parameters" in offload else None,
        blocks=config.dsgraph.blocks or "none",
        drops=drops,
    )


def data_place(config: EngineConfig) -> tuple[int, int]:
    """Return the number of this rank among the data-parallel ranks, and their number."""
    return dist.get_rank() // config.parallel.tp % config.parallel.dp, config.parallel.dp


def check_parallel_arguments(config: EngineConfig, optimizer: object, model_parameters: object, mesh: object) -> None:
    """Raise an error for arguments that the section `parallel` does not support; `read_config` checks the keys.

    Raises:
        ConfigError: Names the argument.
    """
    if mesh is not None:
        raise ConfigError("initialize: mesh has no effect with the section parallel: leave it out")
    if not config.has_stages:
        return
    if isinstance(optimizer, Optimizer):
        raise ConfigError(
            "initialize: optimizer updates the whole model, but pipeline stages split it: pass a function of "
            "parameters that makes an optimizer, or name one in the configuration"
        )
    if config.optimizer is not None and entry_of(config.optimizer.type).by_layer:
        raise ConfigError(
            f"optimizer.type: {config.optimizer.type} needs full parameters, which no rank has with "
            "pipeline stages: choose another optimizer"
        )
    if model_parameters is not None:
        raise ConfigError("initialize: model_parameters has no effect with pipeline stages: leave it out")
