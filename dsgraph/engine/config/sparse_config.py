"""The section `sparse_attention`."""

from __future__ import annotations

from typing import Any, Literal

from dsgraph.inductor_ext.sparse.layouts import Layout, SparseLayoutError
from dsgraph.inductor_ext.sparse.reading import layout_of
from dsgraph.utils.errors import ConfigError

from .key import Needs, key
from .section import Section


class SparseAttentionConfig(Section):
    """Blocks of scores that self-attention computes, see docs/guides/long-sequences.md; each mode has its own keys."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local"] = key(
        "fixed", "layout of the blocks", stages=True
    )
    block: int | None = key(None, "queries and keys per block; default: 16", stages=True)
    different_layout_per_head: bool | None = key(
        None,
        "allow a different layout per head",
        stages=True,
        needs=(Needs("parallel.tp", (1,), "each rank has different heads", only=True),),
    )
    num_local_blocks: int | None = key(None, "fixed: blocks per window", stages=True)
    num_global_blocks: int | None = key(
        None,
        "fixed: global blocks per window; bigbird: number of first blocks that are global (all queries see them)",
        stages=True,
    )
    attention: Literal["bidirectional", "unidirectional"] | None = key(
        None, "unidirectional: queries see no later keys", stages=True
    )
    horizontal_global_attention: bool | None = key(
        None, "fixed, variable: queries of global blocks see all keys", stages=True
    )
    num_different_global_patterns: int | None = key(
        None, "fixed: number of different global positions in a window; heads take turns", stages=True
    )
    num_random_blocks: int | None = key(None, "variable, bigbird: random blocks per row", stages=True)
    local_window_blocks: tuple[int, ...] | None = key(None, "variable: sizes of the windows", stages=True)
    global_block_indices: tuple[int, ...] | None = key(None, "variable, bslongformer: global blocks", stages=True)
    global_block_end_indices: tuple[int, ...] | None = key(
        None, "variable, bslongformer: end (exclusive) of each range of global blocks", stages=True
    )
    num_sliding_window_blocks: int | None = key(None, "bigbird, bslongformer, local: width of the window", stages=True)
    seed: int | None = key(None, "variable, bigbird: seed of the random blocks", stages=True)


def layout_of_section(section: SparseAttentionConfig, _: Any) -> Layout:
    """Return the layout that the section describes.

    Raises:
        ConfigError: The mode has no such key, or a value is not supported.
    """
    try:
        return layout_of(section.model_dump(exclude_none=True))
    except SparseLayoutError as error:
        raise ConfigError(f"sparse_attention: {error}") from None
