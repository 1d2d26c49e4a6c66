"""The ops: every `dsgraph::` op.

Each has an eager kernel and a fake, a derivative if autograd can reach it, and a lowering if Inductor needs one.
Importing this package registers the ops; `register_lowerings` registers the lowerings.
"""

from .collectives.algorithms import (
    COALESCING_BACKENDS,
    EXCHANGES,
    GATHERS,
    REDUCE_SCATTERS,
    Ranks,
    chunk_rows,
    pad_rows,
    start_gather_rows,
    start_reducing,
    sum_over,
    usual_gather,
)
from .collectives.cache_slices import write_heads, write_own_heads
from .collectives.compressed_reduction import (
    COMPRESSED,
    average_chunk,
    put_together,
    reduce_compressed,
    rows_of,
    take_in_gradient,
)
from .collectives.exchange_by_messages import exchange_by_messages, exchange_by_messages_coalesced
from .collectives.exchange_by_messages import register_lowering as _register_exchange
from .collectives.few_bits_slices import multiply_own_weight, multiply_sliced_weight
from .collectives.gather_by_messages import gather_by_messages, gather_by_messages_coalesced, start_gather
from .collectives.gather_by_messages import register_lowering as _register_gather
from .collectives.gather_param import gather_param, reduce_grad, start_reduction
from .collectives.messages import sends_messages
from .collectives.reductions import AVERAGE, REDUCTIONS, one_group
from .collectives.tensor_slices import (
    enter_slices,
    gather_entered,
    gather_slices,
    own_slice,
    scatter_sum,
    slice_of,
    sum_slices,
)
from .collectives.together import start_gathers_in_place, start_reducing_together
from .collectives.vocabulary import sliced_cross_entropy, sliced_embedding
from .compat import backend_name, c10d_functional, resolve_group, share_memory, size_hint
from .kernels.decoding.skinny_groups import register_lowering as _register_groups
from .kernels.launch import on_device_of, on_gpu
from .kernels.linear_cross_entropy import linear_cross_entropy
from .quant.fake_quantize import fake_quantize
from .sparse.block_sparse_attention import block_sparse_attention
from .symbolic_sizes import same_shape, same_size
from .transfers.errors import TransferError
from .transfers.ops import finish_offload, offload, reload
from .transfers.ops import register_lowering as _register_wait
from .transfers.transfers import TIERS, Transfers, transfers_of


def register_lowerings() -> None:
    """Register with Inductor the ops that are collectives, waits, and products with 4-bit weights."""
    _register_groups()
    _register_wait()
    _register_gather()
    _register_exchange()


__all__ = [
    "AVERAGE",
    "COALESCING_BACKENDS",
    "COMPRESSED",
    "REDUCTIONS",
    "one_group",
    "EXCHANGES",
    "GATHERS",
    "TIERS",
    "REDUCE_SCATTERS",
    "Ranks",
    "TransferError",
    "Transfers",
    "average_chunk",
    "backend_name",
    "block_sparse_attention",
    "c10d_functional",
    "chunk_rows",
    "enter_slices",
    "exchange_by_messages",
    "exchange_by_messages_coalesced",
    "fake_quantize",
    "finish_offload",
    "gather_by_messages",
    "gather_by_messages_coalesced",
    "gather_param",
    "gather_entered",
    "gather_slices",
    "linear_cross_entropy",
    "multiply_own_weight",
    "multiply_sliced_weight",
    "offload",
    "on_device_of",
    "on_gpu",
    "own_slice",
    "scatter_sum",
    "pad_rows",
    "put_together",
    "reduce_compressed",
    "reduce_grad",
    "reload",
    "register_lowerings",
    "resolve_group",
    "rows_of",
    "same_shape",
    "same_size",
    "sends_messages",
    "share_memory",
    "size_hint",
    "slice_of",
    "sliced_cross_entropy",
    "sliced_embedding",
    "start_gather",
    "start_gather_rows",
    "start_gathers_in_place",
    "start_reducing",
    "start_reducing_together",
    "start_reduction",
    "sum_over",
    "sum_slices",
    "take_in_gradient",
    "transfers_of",
    "usual_gather",
    "write_heads",
    "write_own_heads",
]
