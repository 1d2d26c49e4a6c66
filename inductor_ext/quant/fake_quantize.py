"""Fake quantization of a weight, in its own dtype, for quantization-aware training.

For a weight w with one scale for each row (output channel), or for each of equal parts of its memory, and control `[3]`
= levels, share, seed:

    symmetric:   scale = max |w| / levels              least = 0                lowest = -levels
    asymmetric:  scale = (max w - min w) / levels      least = min w            lowest = 0
    number = clamp(round((w - least) / scale), lowest, levels)
    result = share * w + (1 - share) * (number * scale + least)

It is `quantize_rows` for symmetric rows with 127 levels, and `quantize_groups` for asymmetric parts of a group's size
with 15, bit for bit. The derivative is that of `result = w` (Bengio et al., arXiv 1308.3432: straight through). The
number of bits is in a tensor, so that no graph is compiled again when it decreases. Stochastic rounding is floor(x +
u), where u in [0, 1) is a hash of seed and position: a recomputation, for the backward or on another rank, gives the
same result.

A pass inserts `reference` after the tracing that decomposes ops, so it calls no op that Inductor has to decompose: no
`clamp` between tensors, `lerp`, `t`, `zeros_like`, `arange`, or number minus tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op

_PRIMES = (1_664_525, 22_695_477, 1_103_515_245)


def reference(
    weight: Tensor, control: Tensor, *, groups: int, transposed: bool, symmetric: bool, stochastic: bool
) -> Tensor:
    """Compute the op in plain torch.

    Args:
        weight: Floating point, (out_features, in_features).
        control: float32 [3]: levels on one side (symmetric) or above the least, the share of the unrounded weight, and
            an integer below 2^24 as seed of stochastic rounding.
        groups: Number of parts of the weight's memory with one scale each; 0: one scale for each output channel.
        transposed: True if the weight is (in_features, out_features).
        symmetric: True if 0 stays 0.
        stochastic: True for stochastic rounding, instead of rounding to nearest.

    Returns:
        A contiguous tensor of the shape and dtype of `weight`.
    """
    wide = weight if weight.dtype == torch.float64 else weight.float()
    rows = wide.permute(1, 0) if transposed and not groups else wide
    shape = rows.shape
    if groups:
        rows = rows.reshape(groups, -1)
    levels, share, seed = control[0], control[1], control[2]
    tiny = torch.finfo(torch.float32).tiny
    if symmetric:
        scale = rows.abs().amax(1, keepdim=True).clamp_min(tiny) / levels
        numbers, lowest = rows / scale, -levels
    else:
        least = rows.amin(1, keepdim=True)
        scale = (rows.amax(1, keepdim=True) - least).clamp_min(tiny) / levels
        numbers, lowest = (rows - least) / scale, 0 * levels
    numbers = (numbers + _drawn(rows, seed)).floor() if stochastic else numbers.round()
    made = torch.minimum(torch.maximum(numbers, lowest), levels) * scale
    if not symmetric:
        made = made + least
    share = share.to(rows.dtype)
    result = (share * rows + (-share + 1) * made).reshape(shape)
    return (result.permute(1, 0) if transposed and not groups else result).to(weight.dtype).contiguous()


def _drawn(rows: Tensor, seed: Tensor) -> Tensor:
    """Return numbers in [0, 1), in the shape of `rows`. Products stay below 2^62."""
    how = {"dtype": torch.int64, "device": rows.device, "requires_grad": False}
    place = torch.ops.prims.iota(rows.numel(), start=0, step=1, **how).view(rows.shape)
    mixed = (place & 0x7FFFFFFF) ^ (seed.long() * _PRIMES[0] & 0x7FFFFFFF)
    for prime in _PRIMES:
        mixed = (mixed ^ (mixed >> 15)) * prime & 0x7FFFFFFF
    mixed = mixed ^ (mixed >> 13)
    return (mixed >> 7).to(rows.dtype) / 2**24


@define_op(like=reference, fake=lambda weight, control, **options: weight.new_empty(weight.shape))
def fake_quantize(weight: Tensor, control: Tensor, **options: Any) -> Tensor:
    """Return a fake-quantized weight, with the arguments of `reference`."""
    return reference(weight, control, **options)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    """Save nothing for the backward."""


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


fake_quantize.register_autograd(_backward, setup_context=_setup)
