"""`dsgraph.parallelize`: data, tensor and pipeline parallelism in one call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dsgraph.ranks.mesh import parameter_devices
from dsgraph.utils.errors import OptionError

from .pipeline.pipeline import pipeline
from .pipeline.pipelined import PipelinedModel
from .pipeline.schedule_order import SCHEDULES
from .pipeline.stage_chain import NO_TECHNIQUES, Techniques
from .pipeline.stage_values import Materialize
from .tensor.tensor_parallel import tensor_parallel


def parallelize(
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero_stage: int = 1,
    microbatches: int | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    schedule: str = "1F1B",
    split: str | Sequence[str] = "auto",
    plan: Literal["auto"] | Mapping[str, Any] = "auto",
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    keep_whole_below: int | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    materialize: Materialize | None = None,
    options: Mapping[str, Any] | None = None,
    techniques: Techniques = NO_TECHNIQUES,
) -> PipelinedModel:
    """Distribute an unmodified model over dp x tp x pp ranks: ZeRO, tensor parallelism, pipeline stages.

    Every rank calls it with the same model. Neighbouring ranks are tensor-parallel, which sends most; then come
    data-parallel ranks; pipeline stages are farthest apart, on other nodes if ranks are numbered node by node.

    Args:
        model: A model on one device that `pipeline` and, with `tp`, `tensor_parallel` support.
        example_inputs: Positional arguments of one micro-batch.
        dp: Number of data-parallel ranks.
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline ranks.
        zero_stage: ZeRO stage over the `dp` ranks, 0 to 3.
        microbatches: Number of micro-batches of a step; None: the number of stages.
        example_kwargs: Named arguments of one micro-batch.
        schedule: See `pipeline`.
        split: See `pipeline`.
        plan: See `tensor_parallel`.
        loss_fn: See `pipeline`.
        keep_whole_below: See `partition`.
        param_dtype: See `pipeline`.
        reduce_dtype: See `pipeline`.
        materialize: See `pipeline`; with `tp` the model must have values already.
        options: See `pipeline`.
        techniques: Changes that the engine needs.

    Returns:
        This rank's part of the model: `step(...)` with this rank's batch, equal on all ranks but those of `dp`.

    Raises:
        OptionError: dp x tp x pp is not the number of ranks, or an option does not fit.
        PartitionError: A part of the model is not supported.
    """
    _check(dp=dp, tp=tp, pp=pp)
    mesh = init_device_mesh(_device_of(model), (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    if tp > 1:
        tensor_parallel(model, mesh["tp"], plan=plan, example_inputs=one_of(example_inputs, example_kwargs))
    count = pp * (2 if SCHEDULES.get(schedule) else 1) if microbatches is None else microbatches
    return pipeline(
        model,
        mesh["pp"],
        example_inputs,
        example_kwargs=example_kwargs,
        microbatches=count,
        schedule=schedule,
        split=split,
        loss_fn=loss_fn,
        materialize=materialize,
        **_copies(
            mesh["dp"], techniques, zero_stage, keep_whole_below, param_dtype=param_dtype, reduce_dtype=reduce_dtype
        ),
        options=options,
        techniques=techniques,
    )


def _copies(
    mesh: DeviceMesh,
    techniques: Techniques,
    zero_stage: int,
    keep_whole_below: int | None,
    **dtypes: torch.dtype | None,
) -> dict[str, Any]:
    """Return the arguments of `pipeline` for the data-parallel ranks: one rank has shards only if they are needed."""
    is_sharded = mesh.size() > 1 or techniques.needs_shards
    how: dict[str, Any] = {"zero_stage": zero_stage, "keep_whole_below": keep_whole_below} if is_sharded else {}
    return {"data_parallel": mesh if is_sharded or any(dtypes.values()) else None, **how, **dtypes}


def one_of(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...] | dict[str, Any]:
    """Return the arguments of a model as `tensor_parallel` takes them.

    Raises:
        OptionError: Some are positional, and others are named.
    """
    if args and kwargs:
        raise OptionError("parallelize: with tp, give example_inputs or example_kwargs, not both")
    return dict(kwargs) if kwargs else args


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise OptionError(f"parallelize: {name} is {size!r}; it takes a number of ranks, 1 or more")
    product, world = sizes["dp"] * sizes["tp"] * sizes["pp"], dist.get_world_size()
    if product != world:
        written = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise OptionError(f"parallelize: {written} need {product} ranks, but there are {world}")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if sizes["tp"] > 1 and local % sizes["tp"]:
        warnings.warn(
            f"parallelize: tp is {sizes['tp']}, and a node has {local} ranks: slices of operators travel between nodes",
            stacklevel=3,
        )


def _device_of(model: nn.Module) -> str:
    """Return the device of a model; for one without values the accelerator."""
    devices = parameter_devices(model)
    if devices and devices[0] != "meta":
        return devices[0]
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else "cpu"
