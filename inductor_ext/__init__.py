"""Floor 0, the instruction set: every `dsgraph::` op with its reference, fake kernel and derivative.

Importing this package registers the ops.
"""

from .compat import c10d_functional, resolve_group
from .gather_by_broadcasts import gather_by_broadcasts, start_broadcasts
from .gather_param import (
    all_gather_rows,
    all_reduce_sum,
    chunk_rows,
    gather_param,
    group_count,
    pad_rows,
    reduce_grad,
    reduce_scatter_rows,
)

__all__ = [
    "all_gather_rows",
    "all_reduce_sum",
    "c10d_functional",
    "chunk_rows",
    "gather_by_broadcasts",
    "gather_param",
    "group_count",
    "pad_rows",
    "reduce_grad",
    "reduce_scatter_rows",
    "resolve_group",
    "start_broadcasts",
]
