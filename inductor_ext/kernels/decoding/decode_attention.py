"""Attention of one query a sequence over a static cache, of which only the filled part is read.

For q `[b, h, 1, d]`, keys and values `[b, g, s, d]`, g a divisor of h, and a mask `[b or 1, 1, 1, s]`, True for visible
positions, with f the last visible position of any sequence, plus 1:

    scores = scale * q @ keys[:, :, :f]^T               [b, h, 1, f]; head i reads the keys of head i // (h / g)
    y      = softmax(scores where mask, else -inf) @ values[:, :, :f]

The softmax is in float32. Torch's own kernels read all s positions. On the CPU it is C++ (`decode_attention_cpp.py`),
or torch on a slice of the cache for arguments that C++ does not support. On a GPU f stays there, and one program of the
Triton kernel computes one head online (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dsgraph.inductor_ext.kernels.launch import (
    next_power_of_2,
    on_device_of,
    takes_triton,
    tl,
    triton,
    why_not_floating,
)
from dsgraph.inductor_ext.ops import define_op

from . import decode_attention_cpp

_BLOCK = 64


def reference(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Compute the op in plain torch, over all positions.

    Args:
        q: `[b, h, 1, d]`, a floating dtype.
        keys: `[b, g, s, d]`, of the same dtype.
        values: A tensor like keys.
        mask: bool `[b or 1, 1, 1, s]`. Each sequence has at least one visible position.
        scale: The factor of the scores.

    Returns:
        `[b, h, 1, d]`, contiguous.
    """
    shared = keys.shape[1] != q.shape[1]
    y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=shared)
    return y.contiguous()


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, keys_ptr, values_ptr, mask_ptr, filled_ptr, y_ptr, scale, heads, q_stride0, q_stride1,
    keys_stride0, keys_stride1, keys_stride2, values_stride0, values_stride1, values_stride2, mask_stride0,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one head of a sequence in each program; there are `D` columns, a power of two."""
    sequence, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    column = tl.arange(0, D)
    q = tl.load(q_ptr + sequence * q_stride0 + head * q_stride1 + column).to(tl.float32) * scale
    keys_at = keys_ptr + sequence * keys_stride0 + (head // GROUP) * keys_stride1
    values_at = values_ptr + sequence * values_stride0 + (head // GROUP) * values_stride1
    filled = tl.load(filled_ptr)
    largest, total, y = -3.0e38, 0.0, tl.zeros((D,), tl.float32)
    for start in range(0, filled, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < filled
        counts = tl.load(mask_ptr + sequence * mask_stride0 + place, mask=inside, other=0) != 0
        keys = tl.load(keys_at + place[:, None] * keys_stride2 + column[None, :], mask=inside[:, None], other=0.0)
        scores = tl.where(counts, tl.sum(keys.to(tl.float32) * q[None, :], 1), -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        weights, kept = tl.exp(scores - new), tl.exp(largest - new)
        values = tl.load(values_at + place[:, None] * values_stride2 + column[None, :], mask=inside[:, None], other=0.0)
        y = y * kept + tl.sum(values.to(tl.float32) * weights[:, None], 0)
        total = total * kept + tl.sum(weights, 0)
        largest = new
    at = y_ptr + (sequence * heads + head) * D + column
    tl.store(at, (y / total).to(y_ptr.dtype.element_ty))


def launch(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Compute `reference` by the Triton kernel."""
    q, keys, values = (item if item.stride(-1) == 1 else item.contiguous() for item in (q, keys, values))
    sequences, heads, _, d = q.shape
    y = q.new_empty(q.shape)
    wide = mask.expand(sequences, 1, 1, keys.shape[2])
    wide = wide if wide.stride(-1) == 1 else wide.contiguous()
    with on_device_of(q):
        attention_kernel[(sequences * heads,)](
            *(q, keys, values, wide, _filled(mask), y, scale, heads),
            *(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], wide.stride(0)),
            GROUP=heads // keys.shape[1],
            D=d,
            BLOCK=_BLOCK,
        )
    return y


def _filled(mask: Tensor) -> Tensor:
    """Return the last visible position of any sequence, plus 1: int64, a tensor of one element."""
    places = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    return (mask * places).amax()


def _sliced(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    filled = max(1, int(_filled(mask)))
    return reference(q, keys[:, :, :filled], values[:, :, :filled], mask[..., :filled], scale=scale)


@define_op(like=reference, fake=lambda q, keys, values, mask, *, scale: q.new_empty(q.shape))
def decode_attention(q: Tensor, *others: Tensor, scale: float) -> Any:
    """Compute attention over the filled part of a cache, with the arguments of `reference`. It has no derivative."""
    if takes_triton(q):
        return launch(q, *others, scale=scale)
    found = traceable(q, *others, scale=scale)
    return _sliced(q, *others, scale=scale) if found is NotImplemented else found


def traceable(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Return what Inductor compiles: C++ if it supports these; else NotImplemented, and the op is called."""
    if decode_attention_cpp.takes(q, keys, values, mask):
        return decode_attention_cpp.decode_attention_product(q, keys, values, mask, scale)
    return NotImplemented


def supports(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, **options: Any) -> str | None:
    """Return why the op does not support these arguments, or None."""
    if not q.ndim == keys.ndim == values.ndim == mask.ndim == 4:
        return "its queries, keys, values and mask do not all have 4 dimensions"
    if mask.dtype != torch.bool:
        return f"its mask is {mask.dtype}, where torch.bool is expected"
    if tuple(mask.shape[1:3]) != (1, 1) or mask.shape[-1] != keys.shape[2]:
        return f"its mask is {list(mask.shape)}, and its cache has {keys.shape[2]} positions"
    if keys.shape != values.shape or q.shape[1] % keys.shape[1] or keys.shape[0] != q.shape[0]:
        return f"its keys are {list(keys.shape)}, its values {list(values.shape)}, its queries {list(q.shape)}"
    if q.device.type != "cpu" and q.shape[-1] != next_power_of_2(q.shape[-1]):
        return f"its heads have {q.shape[-1]} columns, no power of two"
    return why_not_floating(queries=q)
