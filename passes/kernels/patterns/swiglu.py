"""SwiGLU as models spell it: transformers' `act_fn(gate_proj(x)) * up_proj(x)`, `a * sigmoid(a) * b`.

silu(gate) * up                                                     # the anchor is the silu
(gate * sigmoid(gate)) * up, gate * (sigmoid(gate) * up), ...       # or the sigmoid
"""

from __future__ import annotations

from torch.fx import Node

from dsgraph.inductor_ext.kernels import swiglu as kernel
from dsgraph.passes.kernels.gates import gated, products_of
from dsgraph.passes.kernels.matching import call_of, either_way, is_call, number_of, value_of
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel


def is_anchor(node: Node) -> bool:
    """A call of `silu`, or of `sigmoid`."""
    return is_call(node, "silu", "sigmoid")


def match(node: Node) -> Match | NearMiss | None:
    """Finds the product with what `node` lets through."""
    call = call_of(node)
    if call is None or not isinstance(call.input, Node):
        return None
    if call.kind == "silu":
        return gated(node, call.input)
    return _match_sigmoid(node, call.input)


def _match_sigmoid(sigmoid: Node, gate: Node) -> Match | NearMiss | None:
    for product, other in products_of(sigmoid):
        if other is gate:
            return gated(product, gate)
        for outer, last in products_of(product):
            if last is gate:  # gate * (sigmoid(gate) * up)
                return gated(product, gate, up=other, end=outer)
        call = call_of(other)
        if call is not None and call.kind == "mul":  # sigmoid(gate) * (gate * up)
            for mine, up in either_way(call):
                if mine is gate:
                    return gated(other, gate, up=up, end=product)
    return _scaled_sigmoid(sigmoid, gate)


def _scaled_sigmoid(sigmoid: Node, argument: Node) -> NearMiss | None:
    """`x * sigmoid(1.702 * x) * up`, which is another function."""
    call = call_of(argument)
    if call is None or call.kind != "mul":
        return None
    for gate, scale in either_way(call):
        if number_of(scale) is None or not isinstance(gate, Node):
            continue
        for product, other in products_of(sigmoid):
            if other is gate and any(value_of(up) is not None for _, up in products_of(product)):
                return NearMiss(sigmoid, f"its sigmoid is of {scale} times what it lets through")
    return None


SPEC = traced_kernel(
    "swiglu",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=gain_by_fusing(forward=2, backward=3),
    triton=(kernel.forward_kernel, kernel.backward_kernel),
)
