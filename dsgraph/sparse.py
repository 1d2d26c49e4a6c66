"""Layouts of block-sparse attention: the blocks of keys that each block of queries sees.

They are arguments of the option `sparse_attention`, `dsgraph.ops.block_sparse_attention` and
`dsgraph.nn.SparseSelfAttention`; docs/guides/long-sequences.md shows each.
"""

from dsgraph.inductor_ext.sparse.custom import Custom, from_block_mask, from_mask_mod
from dsgraph.inductor_ext.sparse.layouts import BlockCodes, Layout, SparseLayoutError
from dsgraph.inductor_ext.sparse.patterns import BigBird, BSLongformer, Dense, Fixed, LocalSlidingWindow, Variable
from dsgraph.inductor_ext.sparse.reading import MODES, layout_of

__all__ = [
    "MODES",
    "BSLongformer",
    "BigBird",
    "BlockCodes",
    "Custom",
    "Dense",
    "Fixed",
    "Layout",
    "LocalSlidingWindow",
    "SparseLayoutError",
    "Variable",
    "from_block_mask",
    "from_mask_mod",
    "layout_of",
]
