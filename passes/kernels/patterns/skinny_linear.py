"""Linear layers that are skinny matmuls (small batch), as decoding computes them.

F.linear(x, weight, bias)                                  # the anchor
torch.addmm(bias, x, weight)                               # transformers' Conv1D, if `weight.t()` is contiguous
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.compat import decompose
from dsgraph.inductor_ext.kernels.decoding import skinny_linear as kernel
from dsgraph.passes.kernels.matching import Call, call_of, is_call, value_of
from dsgraph.passes.kernels.spec import Derived, Gain, KernelSpec, Match, Setting

# Smaller weights stay in caches from token to token.
_LEAST_BYTES = 1 << 20
# With more rows torch's product takes as long or less: it uses the CPU's instructions for products of bfloat16.
_MOST_ROWS = {torch.float32: kernel.MOST_ROWS, torch.bfloat16: kernel.MOST_ROWS // 2}


def is_anchor(node: Node) -> bool:
    """Return whether a node calls `linear` or `addmm`."""
    return is_call(node, "linear", "addmm")


def match(node: Node) -> Match | None:
    """Match the layer if its batch is small, it has no gradients, and its weight is a matrix."""
    layer = _layer(call_of(node))
    x = value_of(layer[0]) if layer is not None else None
    if layer is None or x is None or value_of(node) is None:
        return None
    rows = math.prod(x.shape[:-1])
    if not isinstance(rows, int) or rows > kernel.MOST_ROWS:
        return None  # an ordinary product
    if value_of(node).requires_grad:  # type: ignore[union-attr]
        return None  # training
    return Match(node, (*layer, None))


def _layer(call: Call | None) -> tuple[Any, Any, Any] | None:
    """Return input, weight by rows, and bias; None if the weight is stored by columns: torch reads that faster."""
    if call is None or call.kind == "linear":
        found = call and (call["input"], call["weight"], call["bias"])
        return found if found and value_of(found[1]) is not None else None
    bias, weight = value_of(call["input"]), value_of(call["mat2"])
    if (call["beta"], call["alpha"]) != (1, 1) or bias is None or bias.ndim != 1 or weight is None:
        return None
    turned = weight.ndim == 2 and weight.t().is_contiguous() and bias.shape[0] == weight.shape[1]
    return (call["mat1"], Derived("t", (call["mat2"],)), call["input"]) if turned else None


def _gain(match: Match, setting: Setting) -> Gain:
    given = match.inputs[1]
    x, weight = value_of(match.inputs[0]), value_of(given.args[0] if isinstance(given, Derived) else given)
    assert x is not None and weight is not None
    size = weight.numel() * weight.element_size()
    if setting.device_type != "cpu":
        return Gain(0, 0, "torch's product was faster on an H100")
    if not setting.fuses:
        return Gain(0, 0, "on the CPU it is the same call")
    if math.prod(x.shape[:-1]) > _MOST_ROWS.get(weight.dtype, 0):
        return Gain(0, 0, "torch's product is as fast")
    if size < _LEAST_BYTES:
        return Gain(0, 0, "its weight stays in caches")
    return Gain(0, size, "it reads the weight at the rate of memory, torch's product below it")


SPEC = KernelSpec(
    name="skinny_linear",
    op=torch.ops.dsgraph.skinny_linear.default,
    reference=kernel.reference,
    is_anchor=is_anchor,
    match=match,
    gain=_gain,
    supports=kernel.supports,
    register=lambda: decompose(torch.ops.dsgraph.skinny_linear.default, kernel.traceable, at_times=True),
    triton=(kernel.product_kernel,),
)
