"""The passes that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsgraph.errors import ConfigError
from dsgraph.nearest import nearest
from dsgraph.passes import (
    GraphPass,
    PassError,
    Pipeline,
    StreamBackwardParameters,
    StreamForwardParameters,
    default_pipeline,
)

from .config import EngineConfig
from .offload_config import OffloadParamConfig

_GATHERS = ("bucket_forward_gathers", "bucket_backward_gathers")
_REDUCTIONS = ("bucket_small_reductions", "bucket_reductions")
_OVERLAP = ("prefetch_forward_gathers", "prefetch_backward_gathers", "delay_reduction_waits")


def pipeline_of(config: EngineConfig, dtype: torch.dtype) -> Pipeline | None:
    """The passes that a configuration asks for; None: the default ones.

    Args:
        config: The whole file.
        dtype: Dtype of what travels: the section `zero_optimization` counts elements, passes count bytes.

    Raises:
        ConfigError: `dsgraph.pipeline` names an unknown pass, or passes in an order that cannot be.
    """
    zero, named = config.zero_optimization, config.dsgraph.pipeline
    bounds = dict.fromkeys(_GATHERS, zero.allgather_bucket_size) | dict.fromkeys(_REDUCTIONS, zero.reduce_bucket_size)
    streaming = _streaming(zero.offload_param)
    if named is None and zero.overlap_comm is not False and not any(bounds.values()) and not streaming:
        return None
    passes = []
    for item in _named(named):
        if named is None and zero.overlap_comm is False and item.name in _OVERLAP:
            continue
        elements = bounds.get(item.name)
        passes.append(replace(item, bucket_bytes=elements * dtype.itemsize) if elements else item)  # type: ignore[call-arg]
    try:
        return Pipeline([*passes, *streaming])
    except PassError as error:
        raise ConfigError(f"dsgraph.pipeline: {error}") from None


def _streaming(wanted: OffloadParamConfig) -> list[GraphPass]:
    """What reads parameters from disk, if the configuration bounds how much of them is on its way at once."""
    if wanted.device != "nvme" or wanted.read_ahead is None:
        return []
    return [StreamForwardParameters(wanted.read_ahead), StreamBackwardParameters(wanted.read_ahead)]


def _named(names: tuple[str, ...] | None) -> list[GraphPass]:
    """Passes of the default pipeline by name; all of them for None."""
    known = {item.name: item for item in default_pipeline()}
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"dsgraph.pipeline: unknown pass {name!r}{nearest(name, known)}; known: {', '.join(known)}"
            )
    return [known[name] for name in (known if names is None else names)]
