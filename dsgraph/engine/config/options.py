"""The options that a configuration sets: of `partition` and of the backend."""

from __future__ import annotations

from typing import Any

import torch

from dsgraph.compiler.options import parse_options
from dsgraph.compiler.pipeline import bind_options
from dsgraph.engine.optimizers.offloading import partition_offload
from dsgraph.utils.errors import ConfigError, OptionError

from .engine_config import EngineConfig
from .sparse_layout import sparse_layout

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def compute_dtype(settings: EngineConfig) -> torch.dtype | None:
    """Return the dtype in which the forward computes; None for that of the parameters."""
    if settings.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if settings.bf16.enabled else None


def partition_options(settings: EngineConfig) -> dict[str, Any]:
    """Return the arguments of `partition`, without the stage."""
    found: dict[str, Any] = {"param_dtype": compute_dtype(settings)}
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


def backend_options(settings: EngineConfig) -> dict[str, Any]:
    """Return the options of the backend. The section `zero_optimization` counts elements, options count bytes.

    Raises:
        ConfigError: Options contradict each other, or `dsgraph.pipeline` names passes that cannot run.
    """
    own, zero = settings.dsgraph, settings.zero_optimization
    itemsize = (compute_dtype(settings) or torch.float32).itemsize
    found: dict[str, Any] = {"codegen": own.codegen, "strict": own.strict}
    if own.memory_limit is not None:
        found["memory_limit"] = own.memory_limit
    if settings.activation_checkpointing.cpu_checkpointing:
        found["activation_offload"] = "host"
    if own.kernels != "auto":
        found["kernels"] = own.kernels
    if settings.sparse_attention is not None:
        found["sparse_attention"] = sparse_layout(settings)
    if own.pipeline is not None:
        found["pipeline"] = list(own.pipeline)
    if zero.allgather_bucket_size:
        found["gather_bucket_bytes"] = zero.allgather_bucket_size * itemsize
    if zero.reduce_bucket_size:
        found["reduce_bucket_bytes"] = zero.reduce_bucket_size * itemsize
    if zero.overlap_comm is not None:
        found["overlap_comm"] = zero.overlap_comm
    if zero.offload_param.device == "nvme" and zero.offload_param.read_ahead is not None:
        found["read_ahead_bytes"] = zero.offload_param.read_ahead
    try:
        bind_options(parse_options(found, {}))
    except OptionError as error:
        raise ConfigError(f"dsgraph.pipeline: {error.__cause__}" if error.__cause__ else str(error)) from None
    return found
