"""The arguments of a model in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's arguments in a batch: a dict of keywords, a tuple of arguments, or the one argument."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def call_with(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch; see `as_arguments`."""
    args, kwargs = as_arguments(batch)
    return model(*args, **kwargs)
