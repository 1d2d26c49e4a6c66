"""Layouts by name: from a section of a configuration, and from the text in a graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from .custom import Custom
from .layouts import BlockCodes, Layout, SparseLayoutError
from .patterns import BigBird, BSLongformer, Dense, Fixed, LocalSlidingWindow, Variable

MODES: Mapping[str, type[Layout]] = MappingProxyType(
    {kind.mode: kind for kind in (Dense, Fixed, Variable, BigBird, BSLongformer, LocalSlidingWindow, Custom)}
)


def layout_of(section: Mapping[str, Any]) -> Layout:
    """Return the layout of a section such as `{"mode": "fixed", "block": 16}`, with DeepSpeed's keys.

    Raises:
        SparseLayoutError: The mode or a key is unknown, or a value is not supported.
    """
    given = dict(section)
    mode = given.pop("mode", Fixed.mode)
    if mode not in MODES:
        raise SparseLayoutError(f"mode is {mode!r}; it takes one of {', '.join(MODES)}")
    kind = MODES[mode]
    known = [item.name for item in fields(kind)]
    for name in given:
        if name not in known:
            raise SparseLayoutError(f"{name!r} is no field of mode {mode!r}; its fields: {', '.join(known)}")
    return kind(**given)


@lru_cache(maxsize=64)
def read_layout(text: str) -> Layout:
    """Return the layout with the text `Layout.text`."""
    return layout_of(json.loads(text))


@lru_cache(maxsize=64)
def codes_of(text: str, heads: int, length: int, *, causal: bool) -> BlockCodes:
    """Return `Layout.codes`, cached."""
    return read_layout(text).codes(heads, length, causal=causal)
