"""A tensor-parallel key-value cache: each rank holds its heads.

    write_heads:  keys[:, own heads, positions] = states[:, own heads];  full = the keys of all heads

A model's code is captured as for one process, so the op takes and returns all heads. If states are sliced by heads,
`SliceTensors` replaces it by `write_own_heads`, and nothing is sent.
"""

from __future__ import annotations

from torch import Tensor

from dsgraph.inductor_ext.ops import define_op

from .tensor_slices import gather_slices, own_slice

_HEADS, _POSITIONS = 1, 2


def _all_heads(own: Tensor, states: Tensor, positions: Tensor, ranks: int, group: str) -> Tensor:
    return own.new_empty([own.shape[0], own.shape[1] * ranks, *own.shape[2:]])


@define_op(fake=_all_heads, writes=("own",))
def write_heads(own: Tensor, states: Tensor, positions: Tensor, ranks: int, group: str) -> Tensor:
    """Write this rank's heads of new keys or values into its cache.

    Args:
        own: `[rows, heads / ranks, length, width]`: this rank's cache, written to.
        states: `[rows, heads, new, width]`.
        positions: int64 `[new]`: their positions along `length`.
        ranks: Number of ranks of the group.
        group: Name of the process group.

    Returns:
        The cache of all heads, `[rows, heads, length, width]`.
    """
    write_own_heads(own, own_slice(states, _HEADS, 1, ranks, group), positions, group)
    return gather_slices(own, _HEADS, 1, ranks, group)


def write_own_heads(own: Tensor, states: Tensor, positions: Tensor, group: str) -> Tensor:
    """Write states that are sliced by heads already, `[rows, heads / ranks, new, width]`; return `own`."""
    own.index_copy_(_POSITIONS, positions, states)
    return own
