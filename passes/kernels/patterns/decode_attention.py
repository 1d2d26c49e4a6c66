"""Attention of one query over a static cache, as transformers' models call torch's.

F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)                      # the anchor
"""

from __future__ import annotations

import torch
from torch.fx import Node

from dsgraph.inductor_ext.compat import decompose
from dsgraph.inductor_ext.kernels.decoding import decode_attention as kernel
from dsgraph.passes.kernels.matching import call_of, is_call, number_of, value_of
from dsgraph.passes.kernels.spec import Gain, KernelSpec, Match, NearMiss, Setting

# Bytes of a cache that can be read in the time of calling the op in Python; Inductor's code calls C++ directly.
_LEAST_BYTES = 8 << 20


def is_anchor(node: Node) -> bool:
    """Return whether a node calls torch's fused attention."""
    return is_call(node, "fused_attention")


def match(node: Node) -> Match | NearMiss | None:
    """Match an attention with one query a sequence, over more than one key."""
    call, value = call_of(node), value_of(node)
    q = value_of(call.input) if call is not None else None
    keys = value_of(call["key"]) if call is not None else None
    if call is None or q is None or keys is None or value is None or value.requires_grad:
        return None
    if q.ndim != 4 or q.shape[2] != 1 or keys.shape[-2] == 1:
        return None  # a prompt, or training
    if value_of(call["attn_mask"]) is None or call["is_causal"] is not False:
        return NearMiss(node, "it has no mask that says how much of the cache is filled")
    if number_of(call["dropout_p"]) != 0:
        return NearMiss(node, "it drops probabilities")
    scale = q.shape[-1] ** -0.5 if call["scale"] is None else number_of(call["scale"])
    if scale is None:
        return NearMiss(node, f"its scale is {call['scale']}, not a number")
    return Match(node, (call.input, call["key"], call["value"], call["attn_mask"]), {"scale": scale})


def _gain(match: Match, setting: Setting) -> Gain:
    keys = value_of(match.inputs[1])
    assert keys is not None
    size = 2 * keys.numel() * keys.element_size()
    if setting.device_type != "cpu":
        return Gain(0, 0, "torch's kernel was faster on an H100")
    if size < _LEAST_BYTES and not setting.fuses:
        return Gain(0, 0, "its cache is read faster than the kernel is called")
    return Gain(0, size // 2, "of the cache it reads the filled part, half of it on the way")


SPEC = KernelSpec(
    name="decode_attention",
    op=torch.ops.dsgraph.decode_attention.default,
    reference=kernel.reference,
    is_anchor=is_anchor,
    match=match,
    gain=_gain,
    supports=kernel.supports,
    register=lambda: decompose(torch.ops.dsgraph.decode_attention.default, kernel.traceable, at_times=True),
    triton=(kernel.attention_kernel,),
)
