"""GELU of a sum with a bias, as Megatron spells it. The bias inside a call of `linear` is not looked at.

gelu(x + bias)                                                      # the anchor is the gelu, or its tanh or erf
"""

from __future__ import annotations

from torch.fx import Node

from dsgraph.inductor_ext.kernels import bias_gelu as kernel
from dsgraph.inductor_ext.sizes import same_size
from dsgraph.passes.kernels.activations import Gelu, gelu_of
from dsgraph.passes.kernels.matching import (
    before_widening,
    call_of,
    dtype_of,
    either_way,
    is_call,
    value_of,
    with_narrowing,
)
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel


def is_anchor(node: Node) -> bool:
    """A call of `gelu`, or what it is written out with."""
    return is_call(node, "gelu", "erf", "tanh")


def match(node: Node) -> Match | NearMiss | None:
    """Finds the sum that `node` takes."""
    gelu = gelu_of(node)
    total = call_of(gelu.x) if gelu is not None else None
    if gelu is None or total is None or total.kind != "add":
        return None
    for x, bias in either_way(total):
        whole, vector = value_of(x), value_of(bias)
        if whole is not None and vector is not None and vector.ndim == 1 and whole.ndim > 1:
            return _match_sum(gelu, x, bias)
    return None


def _match_sum(gelu: Gelu, x: Node, bias: Node) -> Match | NearMiss:
    whole, vector = value_of(x), value_of(bias)
    assert whole is not None and vector is not None
    if gelu.why_not is not None:
        return NearMiss(gelu.end, gelu.why_not)
    if not same_size(vector.shape[0], whole.shape[-1]):
        return NearMiss(gelu.x, f"its bias has {vector.shape[0]} elements and its input {whole.shape[-1]} columns")
    end = with_narrowing(gelu.end)
    options = {"approximate": gelu.approximate, "dtype": dtype_of(end)}
    return Match(end, (before_widening(x), before_widening(bias)), options)


SPEC = traced_kernel(
    "bias_gelu",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=gain_by_fusing(forward=2, backward=1),  # torch's backward is a kernel and the sum of rows, as ours
    triton=(kernel.forward_kernel, kernel.backward_kernel),
)
