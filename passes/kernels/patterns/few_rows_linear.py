"""Linear layers of few rows, as decoding computes them.

F.linear(x, weight, bias)                                  # the anchor
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from dsgraph.inductor_ext.compat import decompose
from dsgraph.inductor_ext.kernels import few_rows_linear as kernel
from dsgraph.passes.kernels.matching import call_of, is_call, value_of
from dsgraph.passes.kernels.spec import Gain, KernelSpec, Match, Setting

# Smaller weights stay in caches from token to token.
_LEAST_BYTES = 1 << 20


def is_anchor(node: Node) -> bool:
    """A call of `linear`."""
    return is_call(node, "linear")


def match(node: Node) -> Match | None:
    """Takes the layer if it has few rows, no gradients, and a matrix for a weight."""
    call = call_of(node)
    x = value_of(call.input) if call is not None else None
    if call is None or x is None or value_of(call["weight"]) is None:
        return None
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or rows > kernel.MOST_ROWS:
        return None  # an ordinary product
    value = value_of(node)
    if value is None or value.requires_grad:
        return None  # training
    return Match(node, (call.input, call["weight"], call["bias"], None))


def _gain(match: Match, setting: Setting) -> Gain:
    x, weight = value_of(match.inputs[0]), value_of(match.inputs[1])
    assert x is not None and weight is not None
    size = weight.numel() * weight.element_size()
    if setting.device_type != "cpu":
        return Gain(0, 0, "it was not compared with torch's product there")
    if not setting.fuses:
        return Gain(0, 0, "on the CPU it is the same call")
    if math.prod(x.shape[:-1]) > 1 or weight.dtype != torch.float32 or not setting.slow_rows:
        return Gain(0, 0, "torch's product reads the weight as fast")
    if size < _LEAST_BYTES:
        return Gain(0, 0, "its weight stays in caches")
    return Gain(0, size, "torch's product of one row reads float32 slower than a loop")


def _register() -> None:
    decompose(SPEC.op, kernel.traceable, at_times=True)


SPEC = KernelSpec(
    name="few_rows_linear",
    op=torch.ops.dsgraph.few_rows_linear.default,
    reference=kernel.reference,
    is_anchor=is_anchor,
    match=match,
    gain=_gain,
    supports=kernel.supports,
    register=_register,
    triton=(kernel.product_kernel,),
)
