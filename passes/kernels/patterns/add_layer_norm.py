"""LayerNorm of a sum with a residual, as in transformers that normalise before or after each layer.

total = residual + x;  layer_norm(total), in every spelling of `layer_norm`   # the anchor is the norm's
others may read the sum
"""

from __future__ import annotations

from torch.fx import Node

from dsgraph.inductor_ext.kernels import add_layer_norm as kernel
from dsgraph.inductor_ext.kernels import layer_norm as norm
from dsgraph.passes.kernels.matching import is_call
from dsgraph.passes.kernels.norms import of_sum
from dsgraph.passes.kernels.spec import Gain, Match, NearMiss, Setting, gain_of_fusion, traced_kernel

from . import layer_norm


def match(node: Node) -> Match | NearMiss | None:
    """Match the norm with the root `node`, and the sum that is its input."""
    return of_sum(layer_norm.match(node))


def _gain(match: Match, setting: Setting) -> Gain:
    if is_call(match.node, "layer_norm"):  # torch's own is one kernel; if others read the sum, gradients are added
        return gain_of_fusion(setting, forward=2, backward=1 + (len(match.others[1].users) > 1))
    return gain_of_fusion(setting, forward=9, backward=17)


SPEC = traced_kernel(
    "add_layer_norm",
    kernel,
    is_anchor=layer_norm.is_anchor,
    match=match,
    gain=_gain,
    triton=(norm.forward_kernel, norm.backward_kernel),
    results=4,
    takes_from=("layer_norm",),
)
