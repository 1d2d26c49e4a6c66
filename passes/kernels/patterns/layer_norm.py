"""LayerNorm as models spell it: torch's own, transformers' Cohere, by `var` or by the mean of squared differences.

(x - x.mean(-1, keepdim=True)) / sqrt(x.var(-1, unbiased=False, keepdim=True) + eps)         # the anchor is the root
then a cast, a product with `weight`, a sum with `bias`, a cast; each may be missing
"""

from __future__ import annotations

import torch
from torch.fx import Node

from dsgraph.inductor_ext.kernels import layer_norm as kernel
from dsgraph.passes.kernels.likeness import Likeness, Occurrence
from dsgraph.passes.kernels.matching import (
    Call,
    before_widening,
    call_of,
    dtype_of,
    is_call,
    is_last_dim,
    number_of,
    only_user,
    same_value,
    value_of,
)
from dsgraph.passes.kernels.norms import (
    SQUARES,
    is_root,
    quotients,
    why_not_called_so,
    why_not_statistics,
    with_vector,
)
from dsgraph.passes.kernels.spec import Gain, Match, NearMiss, Setting, gain_of_fusion, traced_kernel

_CENTRED = Likeness.of(lambda x, dim, keepdim: x - x.mean(dim, keepdim), anchor="sub")
_VARIANCE = Likeness.of(
    lambda x, dim, unbiased, keepdim, correction, eps: x.var(dim, unbiased, keepdim, correction=correction) + eps,
    anchor="add",
)


def is_anchor(node: Node) -> bool:
    """Return whether a node calls `layer_norm`, or is a root of a sum."""
    return is_root(node) or is_call(node, "layer_norm")


def match(node: Node) -> Match | NearMiss | None:
    """Match the norm with the root `node`."""
    call = call_of(node)
    if call is not None and call.kind == "layer_norm":
        return _match_call(node, call)
    total = call and call.input
    found = next((found for spelling in (_VARIANCE, *SQUARES) for found in spelling.find(total)), None)
    if found is None:
        return None
    x = found["x"] if "unbiased" in found.arguments else _uncentred(found["x"])
    if x is None or found.arguments.get("power", 2) != 2:
        return None
    if _is_unbiased(found):
        return NearMiss(node, "its variance is unbiased, divided by n - 1")
    eps = found["eps"]
    reason = why_not_statistics(x, what="variance", dim=found["dim"], keepdim=found["keepdim"], eps=eps)
    if reason is not None:
        return NearMiss(node, reason)
    for divided, quotient in quotients(node):
        if same_value(x, _uncentred(divided)):
            return _with_weight_and_bias(quotient, x, number_of(eps))
    return NearMiss(node, "what is divided by the root is not what has that variance, less its mean")


def _is_unbiased(found: Occurrence) -> bool:
    correction = found.arguments.get("correction")
    return found.arguments.get("unbiased", False) is not False if correction is None else correction != 0


def _uncentred(node: Node) -> Node | None:
    """Return the x for which a node is `x - x.mean(-1, keepdim=True)`, or None."""
    for found in _CENTRED.find(node):
        value = value_of(found["x"])
        if value is not None and is_last_dim(found["dim"], value) and found["keepdim"] is True:
            return found["x"]
    return None


def _with_weight_and_bias(normalised: Node, x: Node, eps: float | None) -> Match:
    end, inputs = _with_cast(normalised), [before_widening(x)]
    for kind in ("mul", "add"):
        vector, combined = with_vector(end, kind) or (None, end)
        if vector is not None and not _is_no_wider(combined, end):
            vector, combined = None, end
        inputs.append(before_widening(vector))
        end = combined
    end = _with_cast(end)
    return Match(end, (*inputs, eps), {"dtype": dtype_of(end)})


def _with_cast(node: Node) -> Node:
    user = only_user(node)
    return user if is_call(user, "cast") and _is_no_wider(user, node) else node


def _is_no_wider(node: Node, than: Node) -> bool:
    """Return whether a result has a dtype in which the kernel computes: float64 only if that is the input's."""
    dtype = dtype_of(node)
    return dtype in (torch.float32, torch.bfloat16, torch.float16) or (dtype == dtype_of(than) == torch.float64)


def _match_call(node: Node, call: Call) -> Match | NearMiss:
    reason = why_not_called_so(call.input, call["normalized_shape"], call["eps"])
    if reason is not None:
        return NearMiss(node, reason)
    return Match(node, (call.input, call["weight"], call["bias"], number_of(call["eps"])), {"dtype": dtype_of(node)})


def _gain(match: Match, setting: Setting) -> Gain:
    if is_call(match.node, "layer_norm"):
        return Gain(0, 0, "torch's own is one kernel as well")
    return gain_of_fusion(setting, forward=8, backward=16)


SPEC = traced_kernel(
    "layer_norm",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=_gain,
    results=3,
)
