"""The options of the backend that a configuration sets for passes."""

from __future__ import annotations

from typing import Any

import torch

from dsgraph.compiler.options import parse_options
from dsgraph.compiler.pipeline import bind_options
from dsgraph.utils.errors import ConfigError, OptionError

from .engine_config import EngineConfig


def pass_options(config: EngineConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options of the backend that choose passes and set them, such as `reduce_bucket_bytes`.

    Args:
        config: The complete configuration.
        dtype: Dtype of the data sent: the section `zero_optimization` counts elements, options count bytes.

    Raises:
        ConfigError: `dsgraph.pipeline` names an unknown pass, or passes in an order that cannot run.
    """
    zero, found = config.zero_optimization, dict[str, Any]()
    if config.dsgraph.pipeline is not None:
        found["pipeline"] = list(config.dsgraph.pipeline)
    if zero.allgather_bucket_size:
        found["gather_bucket_bytes"] = zero.allgather_bucket_size * dtype.itemsize
    if zero.reduce_bucket_size:
        found["reduce_bucket_bytes"] = zero.reduce_bucket_size * dtype.itemsize
    if zero.overlap_comm is not None:
        found["overlap_comm"] = zero.overlap_comm
    if zero.offload_param.device == "nvme" and zero.offload_param.read_ahead is not None:
        found["read_ahead_bytes"] = zero.offload_param.read_ahead
    try:
        bind_options(parse_options(found, {}))
    except OptionError as error:
        raise ConfigError(f"dsgraph.pipeline: {error.__cause__ or error}") from None
    return found
