"""Layouts of block-sparse attention: which blocks of queries see which blocks of keys.

They are what the option `sparse_attention`, `dsgraph.ops.block_sparse_attention` and `dsgraph.nn.SparseSelfAttention`
take; docs/guides/long-sequences.md says what each looks like.
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
