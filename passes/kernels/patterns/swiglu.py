"""SwiGLU as models spell it: transformers' `act_fn(gate_proj(x)) * up_proj(x)`, `a * sigmoid(a) * b`."""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Node

from dsgraph.inductor_ext.kernels import swiglu as kernel
from dsgraph.passes.kernels.gates import match_gate
from dsgraph.passes.kernels.likeness import Likeness, cast
from dsgraph.passes.kernels.matching import is_call, number_of, value_of
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel

_SPELLINGS = (
    Likeness.of(lambda gate, up: cast(F.silu(gate)) * up, anchor="silu"),
    Likeness.of(lambda gate, up: cast(gate * torch.sigmoid(gate)) * up, anchor="sigmoid"),
    Likeness.of(lambda gate, up: gate * (torch.sigmoid(gate) * up), anchor="sigmoid"),
    Likeness.of(lambda gate, up: torch.sigmoid(gate) * (gate * up), anchor="sigmoid"),
)
_NEAR_MISS = Likeness.of(lambda gate, up, scale: gate * torch.sigmoid(scale * gate) * up, anchor="sigmoid")


def is_anchor(node: Node) -> bool:
    """Return whether a node calls `silu` or `sigmoid`."""
    return is_call(node, "silu", "sigmoid")


def match(node: Node) -> Match | NearMiss | None:
    """Match the product with the result of `node`."""
    for found in chain.from_iterable(spelling.find(node) for spelling in _SPELLINGS):
        answer = match_gate(found.end, found["gate"], found["up"])
        if answer is not None:
            return answer
    for found in _NEAR_MISS.find(node):
        if number_of(found["scale"]) is not None and value_of(found["up"]) is not None:
            return NearMiss(node, f"its sigmoid is of {found['scale']} times what it lets through")
    return None


SPEC = traced_kernel(
    "swiglu",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=gain_by_fusing(forward=2, backward=3),
)
