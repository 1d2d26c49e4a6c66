"""The gather marker of a parameter.

A `ParameterSpec` defines it; equal layers share one class and one graph, because nothing here depends on a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsgraph.passes import ParameterSpec

from .transforms.parameter_transform import ParameterTransform


def gather_marker(
    spec: ParameterSpec,
    shard: Tensor,
    gathered_copy: Tensor | None,
    shape: Sequence[int],
    accumulated_grad: Tensor | None = None,
    reducer: ParameterTransform | None = None,
) -> Tensor:
    """Return the marker of a parameter or, run eagerly, the result of the gather itself.

    Args:
        spec: The parameter.
        shard: This rank's rows.
        gathered_copy: `[*shape]`, gathered before, or None.
        shape: Shape of the full parameter.
        accumulated_grad: A sum of gradients; the backend decides whether the gradient is reduced together with it.
        reducer: The transform that reduces the gradient; None: the average.
    """
    added, options = marker_inputs(accumulated_grad, reducer), marker_options(spec, shard.dtype, reducer)
    return torch.ops.dsgraph.gather_param(shard, gathered_copy, shape, *added, **options)


def marker_inputs(accumulated_grad: Tensor | None, reducer: ParameterTransform | None) -> tuple[Any, ...]:
    """Return the arguments of a marker besides the parameter."""
    if reducer is not None:
        return accumulated_grad, list(reducer.inputs)
    return () if accumulated_grad is None else (accumulated_grad,)


def marker_options(
    spec: ParameterSpec, master: torch.dtype, reducer: ParameterTransform | None = None
) -> dict[str, Any]:
    """Return the options of a marker, for shards in `master`."""
    dtype, reduce_dtype = spec.dtypes(master)
    options = {
        "dtype": dtype,
        "reduce_dtype": reduce_dtype,
        "group": spec.group,
        "outer_groups": list(spec.outer_groups),
    }
    return options if reducer is None else {**options, "reduction": reducer.reduction}


def reduction_options(spec: ParameterSpec, master: torch.dtype) -> dict[str, Any]:
    """Return the options of the reduction of a gradient, for shards in `master`."""
    return {**marker_options(spec, master), "dtype": master}


def cast_leaf(spec: ParameterSpec, leaf: Tensor) -> Tensor:
    """Return a full parameter whose gradient stays on this rank, in the dtype that the forward sees."""
    return leaf if spec.param_dtype is None else leaf.to(spec.param_dtype)
