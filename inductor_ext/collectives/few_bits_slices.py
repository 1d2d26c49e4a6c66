"""Products with a quantized weight of which each tensor-parallel rank holds a slice.

    outputs sliced, dim 0:  y = all x @ w_r^T, in order of the ranks r
    inputs sliced, dim 1:   y = sum over r of x_r @ w_r^T

Scales and minima are those of the full weight's rows or groups, so that ranks use the same numbers as one process. A
model's code is captured as for one process, so the op takes and returns full values. `SliceTensors` replaces it by
`multiply_own_weight` wherever operands or results can stay sliced.
"""

from __future__ import annotations

from torch import Tensor

from dsgraph.inductor_ext.ops import define_op
from dsgraph.inductor_ext.quant.weights import multiply_groups, multiply_rows

from .tensor_slices import gather_slices, own_slice, sum_slices


def _of_all_outputs(
    x: Tensor, packed: Tensor, scale: Tensor, least: Tensor | None, dim: int, parts: int, ranks: int, group: str
) -> Tensor:
    return x.new_empty([*x.shape[:-1], packed.shape[0] * (ranks if dim == 0 else 1)])


@define_op(fake=_of_all_outputs)
def multiply_sliced_weight(
    x: Tensor, packed: Tensor, scale: Tensor, least: Tensor | None, dim: int, parts: int, ranks: int, group: str
) -> Tensor:
    """Multiply `x` by the transposed weight.

    Args:
        x: `[..., inputs]`, floating point.
        packed: This rank's slice of the result of `quantize_rows` or `quantize_groups`.
        scale: Float32, its scales.
        least: Float32, its minima; None: a weight of 8 bits.
        dim: The sliced dimension of the weight `[outputs, inputs]`.
        parts: Number of equal pieces of that dimension, each of which is sliced.
        ranks: Number of ranks of the group.
        group: Name of the process group.

    Returns:
        `[..., outputs]`, in the dtype of `x`.
    """
    last = x.dim() - 1
    if dim == 0:
        return gather_slices(multiply_own_weight(x, packed, scale, least, group), last, parts, ranks, group)
    own = own_slice(x, last, parts, ranks, group).float()  # rounded once, after the sum
    return sum_slices(multiply_own_weight(own, packed, scale, least, group), group).to(x.dtype)


def multiply_own_weight(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor | None, group: str) -> Tensor:
    """Multiply by this rank's slice: columns of the result, or a term of the sum over `group`."""
    rows = x.reshape(-1, x.shape[-1])
    result = multiply_rows(rows, packed, scale) if least is None else multiply_groups(rows, packed, scale, least)
    return result.reshape(*x.shape[:-1], packed.shape[0])
