"""GEGLU as models spell it: transformers' `act_fn(gate_proj(x)) * up_proj(x)` of Gemma and T5.

gelu(gate) * up                                                     # the anchor is the gelu
0.5 * gate * (1 + tanh(...)) * up                                   # or its tanh or erf
"""

from __future__ import annotations

from torch.fx import Node

from dsgraph.inductor_ext.kernels import geglu as kernel
from dsgraph.passes.kernels.activations import gelu_of
from dsgraph.passes.kernels.gates import gated
from dsgraph.passes.kernels.matching import is_call
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel


def is_anchor(node: Node) -> bool:
    """A call of `gelu`, or what it is written out with."""
    return is_call(node, "gelu", "erf", "tanh")


def match(node: Node) -> Match | NearMiss | None:
    """Finds the product with what `node` lets through."""
    found = gelu_of(node)
    if found is None:
        return None
    answer = gated(found.end, found.x, approximate=found.approximate)
    if isinstance(answer, Match) and found.why_not is not None:
        return NearMiss(found.end, found.why_not)
    return answer


SPEC = traced_kernel(
    "geglu",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=gain_by_fusing(forward=2, backward=3),
    triton=(kernel.forward_kernel, kernel.backward_kernel),
    takes_from=("bias_gelu",),
)
