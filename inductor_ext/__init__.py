"""Floor 0, the instruction set: every `dsgraph::` op.

Each with its eager kernel and its fake, its derivative where autograd can meet it, and its lowering where Inductor
needs one. Importing this package registers the ops; `register_lowerings` registers the lowerings.
"""

from .compat import backend_name, c10d_functional, resolve_group
from .exchange_by_messages import exchange_by_messages, exchange_by_messages_coalesced
from .exchange_by_messages import register_lowering as _register_exchange
from .gather_by_messages import gather_by_messages, gather_by_messages_coalesced, start_gather
from .gather_by_messages import register_lowering as _register_gather
from .gather_param import (
    all_gather_rows,
    all_reduce_sum,
    chunk_rows,
    gather_param,
    group_count,
    pad_rows,
    reduce_grad,
    start_reduction,
)
from .messages import sends_messages


def register_lowerings() -> None:
    """Tells Inductor of the ops that are collectives."""
    _register_gather()
    _register_exchange()


__all__ = [
    "all_gather_rows",
    "all_reduce_sum",
    "backend_name",
    "c10d_functional",
    "chunk_rows",
    "exchange_by_messages",
    "exchange_by_messages_coalesced",
    "gather_by_messages",
    "gather_by_messages_coalesced",
    "gather_param",
    "group_count",
    "pad_rows",
    "reduce_grad",
    "register_lowerings",
    "resolve_group",
    "sends_messages",
    "start_gather",
    "start_reduction",
]
