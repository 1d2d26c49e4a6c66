"""Floor 0, the instruction set: every `dsgraph::` op.

Each with its eager kernel and its fake, its derivative where autograd can meet it, and its lowering where Inductor
needs one. Importing this package registers the ops; `register_lowerings` registers the lowerings.
"""

from .compat import c10d_functional, resolve_group
from .gather_by_broadcasts import gather_by_broadcasts, start_broadcasts
from .gather_by_broadcasts import register_lowering as register_lowerings  # the only one so far
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
    "register_lowerings",
    "resolve_group",
    "start_broadcasts",
]
