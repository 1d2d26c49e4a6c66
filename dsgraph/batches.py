"""What a batch is to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def call_with(model: Callable[..., Any], batch: Any) -> Any:
    """Calls a model with a batch: a dict of keywords, a tuple of arguments, or the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
