"""Skinny matmuls (small batch) on a CPU in C++: the weight is read once, at memory bandwidth, whatever its dtype.

    skinny_product:          y[m, n] = sum_k x[m, k] * w[n, k] * scale[n] + bias[n]
    skinny_product_groups:   the same for weights of 4 bits in groups, `quant/weights.py` has their layout

If the library cannot be built, `library` warns once and returns None, and both ops compute in plain torch.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_native

from . import vectors_cpp
from .skinny_source import SOURCE

MOST_ROWS = 16
"""Largest number of rows of x. Products of more rows are bound by arithmetic, for which torch's own are better."""

FLOATING = (torch.float32, torch.bfloat16)
"""Dtypes of x, and of weights that have no scale."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the library of the source above, which registers its kernels.

    None, after a warning, if it cannot be built.
    """
    return vectors_cpp.library(SOURCE, what="skinny matmuls are")


def fake(x: Tensor, weight: Tensor, *others: Tensor | None) -> Tensor:
    """Return an empty result of a skinny matmul."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@define_native(fake=fake, load=library)
def skinny_product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Compute `x @ (weight * scale).t() + bias` for tensors that `takes` accepts.

    Args:
        x: `[..., k]`, float32 or bfloat16.
        weight: `[n, k]`, float32, bfloat16, or int8.
        bias: `[n]`, of the dtype of x; None: no bias.
        scale: float32 `[n]`; None: 1.
    """
    y = x.float() @ weight.float().t()
    y = y if scale is None else y * scale
    return (y if bias is None else y + bias).to(x.dtype)


def weight_of_groups(packed: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Return the dequantized 4-bit weight, float32 `[n, k]`; arguments as below."""
    numbers = torch.cat([packed & 15, packed >> 4], dim=2).float()
    return (numbers * scale[..., None] + least[..., None]).flatten(1)


@define_native(fake=fake, load=library)
def skinny_product_groups(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ weight.t() + bias` with a 4-bit weight, for tensors that `takes_groups` accepts.

    Args:
        x: `[..., k]`, float32 or bfloat16.
        packed: uint8 `[n, groups, k / groups / 2]`.
        scale: float32 `[n, groups]`.
        least: float32 `[n, groups]`.
        bias: `[n]`, of the dtype of x; None: no bias.
    """
    y = x.float() @ weight_of_groups(packed, scale, least).t()
    return (y if bias is None else y + bias).to(x.dtype)


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> bool:
    """Return True if `skinny_product` runs in C++: on a CPU, for its dtypes and shapes, all but x contiguous."""
    if weight.ndim != 2 or weight.dtype not in (*FLOATING, torch.int8):
        return False
    n, k = weight.shape
    return (
        _take(x, k, weight) and _is(bias, x.dtype, (n,)) and _is(scale, torch.float32, (n,)) and library() is not None
    )


def takes_groups(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor) -> bool:
    """Return True if `skinny_product_groups` runs in C++, with the same conditions."""
    if packed.ndim != 3 or packed.dtype != torch.uint8:
        return False
    n, groups, half = packed.shape
    fit = all(_is(each, torch.float32, (n, groups)) for each in (scale, least))
    return fit and _take(x, 2 * groups * half, packed) and library() is not None


def _take(x: Tensor, k: int, weight: Tensor) -> bool:
    is_here = x.device.type == weight.device.type == "cpu"
    return is_here and x.dtype in FLOATING and x.ndim > 0 and x.shape[-1] == k > 0 and weight.is_contiguous()


def _is(value: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    if value is None:
        return True
    return value.device.type == "cpu" and value.dtype == dtype and value.shape == shape and value.is_contiguous()
