"""Layouts by name: what stands in a configuration, and what stands in a graph."""

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
    """A layout of a section such as `{"mode": "fixed", "block": 16}`, with DeepSpeed's keys.

    Raises:
        SparseLayoutError: The mode or a key is unknown, or a value cannot be taken.
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
    """The layout of which `Layout.text` is the text."""
    return layout_of(json.loads(text))


@lru_cache(maxsize=64)
def codes_of(text: str, heads: int, length: int, *, causal: bool) -> BlockCodes:
    """`Layout.codes`, found once."""
    return read_layout(text).codes(heads, length, causal=causal)
