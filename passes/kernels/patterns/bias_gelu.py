"""GELU of a sum with a bias, as in Megatron. The bias inside a call of `linear` is not considered."""

from __future__ import annotations

from torch.fx import Node

from dsgraph.inductor_ext.kernels import bias_gelu as kernel
from dsgraph.inductor_ext.symbolic_sizes import same_size
from dsgraph.passes.kernels.activations import gelu_of, is_gelu
from dsgraph.passes.kernels.likeness import Likeness
from dsgraph.passes.kernels.matching import before_widening, dtype_of, value_of, with_narrowing
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel

_BIASED = Likeness.of(lambda x, bias: x + bias, anchor="add")


def match(node: Node) -> Match | NearMiss | None:
    """Match the sum that is the input of `node`, a GELU or part of one."""
    gelu = gelu_of(node)
    if gelu is None:
        return None
    for found in _BIASED.find(gelu.x):
        x, bias = value_of(found["x"]), value_of(found["bias"])
        if x is not None and bias is not None and bias.ndim == 1 and x.ndim > 1:
            if gelu.why_not is not None:
                return NearMiss(gelu.end, gelu.why_not)
            if not same_size(bias.shape[0], x.shape[-1]):
                return NearMiss(gelu.x, f"its bias has {bias.shape[0]} elements and its input {x.shape[-1]} columns")
            end = with_narrowing(gelu.end)
            options = {"approximate": gelu.approximate, "dtype": dtype_of(end)}
            return Match(end, (before_widening(found["x"]), before_widening(found["bias"])), options)
    return None


SPEC = traced_kernel(
    "bias_gelu",
    kernel,
    is_anchor=is_gelu,
    match=match,
    gain=gain_by_fusing(forward=2, backward=1),  # torch's backward is a kernel and the sum of rows, as ours
)
