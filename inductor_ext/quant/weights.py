"""Weights of 8 and 4 bits: rounding to nearest, packing, and products.

8 bits, one scale a row (output channel), symmetric:

    scale[n] = max_k |w[n, k]| / 127        q[n, k] = round(w[n, k] / scale[n])        w ~ q * scale

4 bits, one scale and one minimum for each group of g neighbours in a row, asymmetric:

    scale[n, j] = (max - min) / 15          q = round((w - min) / scale)               w ~ q * scale + min

A byte holds two 4-bit numbers of one group: byte i of a group has number i in its low bits and number i + g / 2 in its
high bits. So both halves of a group are read in the memory order of the other operand's row.

Skinny matmuls (small batch) are ops that read the bytes and convert them in registers, without storing the converted
weight. More rows are multiplied by the converted weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dsgraph.inductor_ext import compat
from dsgraph.inductor_ext.kernels.decoding.skinny_cpp import weight_of_groups
from dsgraph.inductor_ext.kernels.decoding.skinny_groups import skinny_groups
from dsgraph.inductor_ext.kernels.decoding.skinny_linear import MOST_ROWS, skinny_linear


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 8 bits.

    Args:
        weight: Floating point, (n, k).

    Returns:
        Numbers of -127 to 127, int8 (n, k), and scales, float32 (n,).
    """
    weight = weight.detach().float()
    scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantize_rows(packed: Tensor, scale: Tensor) -> Tensor:
    """Return the dequantized weight of `quantize_rows`, float32 (n, k)."""
    return packed.float() * scale[:, None]


def quantize_groups(weight: Tensor, *, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to 4 bits.

    Args:
        weight: Floating point, (n, k); `group` divides k.
        group: Number of neighbours that share a scale; even.

    Returns:
        Packed numbers, uint8 (n, k / group, group / 2); scales and minima, both float32 (n, k / group).
    """
    groups = weight.detach().float().unflatten(1, (-1, group))
    scale, least = grid_of_groups(groups)
    numbers = ((groups - least[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8)
    return pack_groups(numbers), scale, least


def grid_of_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of groups: float32 (n, groups, group) to twice (n, groups)."""
    least, most = groups.aminmax(dim=2)
    return (most - least).clamp_min(torch.finfo(torch.float32).tiny) / 15, least


def pack_groups(numbers: Tensor) -> Tensor:
    """Pack numbers of 0 to 15: uint8 (n, groups, group) to (n, groups, group / 2)."""
    low, high = numbers.chunk(2, dim=2)
    return low | (high << 4)


def dequantize_groups(packed: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Return the dequantized weight of `quantize_groups`, float32 (n, k)."""
    return weight_of_groups(packed, scale, least)


def multiply_rows(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Multiply `x` by the transposed weight of `quantize_rows`.

    Args:
        x: (m, k), floating point.
        packed: int8 (n, k).
        scale: float32 (n,).

    Returns:
        (m, n), in the dtype of `x`.
    """
    if _is_for_an_op(x):
        return skinny_linear(x, packed, None, scale)
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        # torch's own product reads int8 for bfloat16 with vectors; for float32 it is a scalar loop, slower than none.
        return compat.int8_product(x, packed, scale.to(x.dtype))
    return functional.linear(x, dequantize_rows(packed, scale).to(x.dtype))


def multiply_groups(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Multiply `x` by the transposed weight of `quantize_groups`.

    Args:
        x: (m, k), floating point.
        packed: uint8 (n, k / group, group / 2).
        scale: float32 (n, k / group).
        least: float32 (n, k / group).

    Returns:
        (m, n), in the dtype of `x`.
    """
    if _is_for_an_op(x):
        return skinny_groups(x, packed, scale, least)
    return functional.linear(x, dequantize_groups(packed, scale, least).to(x.dtype))


def _is_for_an_op(x: Tensor) -> bool:
    """Return whether a batch is small enough for the skinny op, which has no derivative."""
    return 0 < x.shape[0] <= MOST_ROWS and not (torch.is_grad_enabled() and x.requires_grad)
