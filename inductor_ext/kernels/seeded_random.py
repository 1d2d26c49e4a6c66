"""Random values that are a function of a seed, and functions of torch that draw such values.

For a seed s and a tensor x of any shape:

    u = uniform in [0, 1), or standard normal, by a generator that starts with s     the shape of x, float32

The default generator is neither read nor changed. So the values depend on neither what ran before, nor on where or in
which order it runs, and recomputing the op gives the same values. Dropout keeps the elements with u >= p.

The functions below take the arguments of torch's functions of the same name, and a seed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_op


def _fake(seed: Tensor, like: Tensor, normal: bool) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device=like.device)


@define_op(fake=_fake)
def seeded_random(seed: Tensor, like: Tensor, normal: bool) -> Tensor:
    """Return random values.

    Args:
        seed: One integer, on the CPU.
        like: A tensor of the shape and on the device of the result.
        normal: True for a standard normal distribution, False for a uniform one in [0, 1).
    """
    generator = torch.Generator(like.device).manual_seed(int(seed))
    drawn = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return drawn.normal_(generator=generator) if normal else drawn.uniform_(generator=generator)


def _draw(seed: Tensor, like: Tensor, *, normal: bool = False) -> Tensor:
    drawn: Tensor = torch.ops.dsgraph.seeded_random(seed, like.detach(), normal)
    return drawn


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, seed: Tensor) -> Tensor:
    """Compute `torch.nn.functional.dropout`."""
    kept, scale = _draw(seed, input) >= p, 0.0 if p == 1 else 1 / (1 - p)
    return input.mul_(kept).mul_(scale) if inplace else input * kept * scale


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: Tensor,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` as torch does on a CPU, with all scores in memory."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    is_narrow = query.dtype in (torch.float16, torch.bfloat16)
    wide = torch.float32 if is_narrow else query.dtype
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query.to(wide) * root) @ (key.to(wide) * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return (dropout(scores.softmax(-1), dropout_p, seed=seed) @ value.to(wide)).to(query.dtype)


def rand_like(input: Tensor, *, dtype: torch.dtype | None = None, seed: Tensor) -> Tensor:
    """Compute `torch.rand_like`."""
    return _draw(seed, input).to(dtype or input.dtype)


def randn_like(input: Tensor, *, dtype: torch.dtype | None = None, seed: Tensor) -> Tensor:
    """Compute `torch.randn_like`."""
    return _draw(seed, input, normal=True).to(dtype or input.dtype)


def rand(*size: Any, dtype: torch.dtype | None = None, device: Any = None, seed: Tensor) -> Tensor:
    """Compute `torch.rand`."""
    like = torch.empty(*size, dtype=dtype, device=device)
    return _draw(seed, like).to(like.dtype)


def randn(*size: Any, dtype: torch.dtype | None = None, device: Any = None, seed: Tensor) -> Tensor:
    """Compute `torch.randn`."""
    like = torch.empty(*size, dtype=dtype, device=device)
    return _draw(seed, like, normal=True).to(like.dtype)


def bernoulli(input: Tensor, *, seed: Tensor) -> Tensor:
    """Compute `torch.bernoulli`."""
    return (_draw(seed, input) < input).to(input.dtype)


def bernoulli_(input: Tensor, p: float | Tensor = 0.5, *, seed: Tensor) -> Tensor:
    """Compute `torch.Tensor.bernoulli_`."""
    return input.copy_(_draw(seed, input) < p)


def uniform_(input: Tensor, a: float = 0.0, b: float = 1.0, *, seed: Tensor) -> Tensor:
    """Compute `torch.Tensor.uniform_`."""
    return input.copy_(a + (b - a) * _draw(seed, input))


def normal_(input: Tensor, mean: float = 0.0, std: float = 1.0, *, seed: Tensor) -> Tensor:
    """Compute `torch.Tensor.normal_`."""
    return input.copy_(mean + std * _draw(seed, input, normal=True))
