"""GEGLU as models spell it: transformers' `act_fn(gate_proj(x)) * up_proj(x)` of Gemma and T5."""

from __future__ import annotations

from torch.fx import Node

from dsgraph.inductor_ext.kernels import geglu as kernel
from dsgraph.passes.kernels.activations import gelu_of, is_gelu
from dsgraph.passes.kernels.gates import match_gate
from dsgraph.passes.kernels.likeness import Likeness, cast
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel

_GATED = Likeness.of(lambda activated, up: cast(activated) * up, anchor="activated")


def match(node: Node) -> Match | NearMiss | None:
    """Match the product with the result of `node`, a GELU or part of one."""
    gelu = gelu_of(node)
    if gelu is None:
        return None
    for found in _GATED.find(gelu.end):
        answer = match_gate(found.end, gelu.x, found["up"], approximate=gelu.approximate)
        if isinstance(answer, Match) and gelu.why_not is not None:
            return NearMiss(gelu.end, gelu.why_not)
        if answer is not None:
            return answer
    return None


SPEC = traced_kernel(
    "geglu",
    kernel,
    is_anchor=is_gelu,
    match=match,
    gain=gain_by_fusing(forward=2, backward=3),
    takes_from=("bias_gelu",),
)
