"""RMSNorm of a sum with a residual, as in transformers that normalise before each layer.

total = residual + x;  rms_norm(total), in every spelling of `rms_norm`       # the anchor is the norm's
others may read the sum
"""

from __future__ import annotations

from torch.fx import Node

from dsgraph.inductor_ext.kernels import add_rms_norm as kernel
from dsgraph.inductor_ext.kernels import rms_norm as norm
from dsgraph.passes.kernels.norms import of_sum
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel

from . import rms_norm


def match(node: Node) -> Match | NearMiss | None:
    """Match the norm with the root `node`, and the sum that is its input."""
    return of_sum(rms_norm.match(node))


SPEC = traced_kernel(
    "add_rms_norm",
    kernel,
    is_anchor=rms_norm.is_anchor,
    match=match,
    gain=gain_by_fusing(forward=7, backward=13),
    triton=(norm.forward_kernel, norm.backward_kernel),
    results=3,
    takes_from=("rms_norm",),
)
