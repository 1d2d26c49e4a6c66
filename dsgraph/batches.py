"""The arguments of a model in a batch, and its results for several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's arguments in a batch: a dict of keywords, a tuple of arguments, or the one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def call_with(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch; see `as_arguments`."""
    args, kwargs = as_arguments(batch)
    return model(*args, **kwargs)


def joined_values(parts: Sequence[Tensor]) -> Tensor:
    """Return the values of micro-batches as one: concatenated, or the mean of floating-point scalars."""
    if parts[0].ndim:
        return torch.cat(list(parts))
    together = torch.stack(list(parts))
    return together.mean() if together.is_floating_point() else together
