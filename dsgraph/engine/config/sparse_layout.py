"""The configuration's `sparse_attention`."""

from __future__ import annotations

from dsgraph.inductor_ext.sparse.layouts import Layout, SparseLayoutError
from dsgraph.inductor_ext.sparse.reading import layout_of
from dsgraph.utils.errors import ConfigError

from .engine_config import EngineConfig


def sparse_layout(settings: EngineConfig) -> Layout:
    """The layout that the section asks for.

    Raises:
        ConfigError: The mode has no such key, a value cannot be taken, or nothing is compiled.
    """
    assert settings.sparse_attention is not None
    if not settings.dsgraph.compile:
        raise ConfigError("sparse_attention has no effect with dsgraph.compile false: remove one of the two")
    try:
        return layout_of(settings.sparse_attention.model_dump(exclude_none=True))
    except SparseLayoutError as error:
        raise ConfigError(f"sparse_attention: {error}") from None
