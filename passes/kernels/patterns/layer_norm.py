"""LayerNorm as models spell it: torch's own, transformers' Cohere, by `var` or by the mean of squared differences.

(x - x.mean(-1, keepdim=True)) / sqrt(x.var(-1, unbiased=False, keepdim=True) + eps)         # the anchor is the root
then a cast, a product with `weight`, a sum with `bias`, a cast; each may be missing
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from dsgraph.inductor_ext.kernels import layer_norm as kernel
from dsgraph.inductor_ext.sizes import same_size
from dsgraph.passes.kernels.matching import (
    Call,
    before_widening,
    call_of,
    dtype_of,
    either_way,
    is_call,
    is_last_dim,
    number_of,
    only_user,
    same_value,
    value_of,
)
from dsgraph.passes.kernels.norms import divided_by, is_root, power_of, why_not_statistics
from dsgraph.passes.kernels.spec import Gain, Match, NearMiss, Setting, gain_of_fusion, traced_kernel


def is_anchor(node: Node) -> bool:
    """A call of `layer_norm`, or a root of a sum."""
    return is_root(node) or is_call(node, "layer_norm")


def match(node: Node) -> Match | NearMiss | None:
    """Finds the norm of which `node` is the root."""
    call = call_of(node)
    if call is None:
        return None
    if call.kind == "layer_norm":
        return _match_call(node, call)
    variance = _variance(call.input)
    if variance is None:
        return None
    reason = variance.why_not()
    if reason is not None:
        return NearMiss(node, reason)
    normalised = divided_by(node, lambda numerator: _is_centred(numerator, variance.x))
    if normalised is None:
        return NearMiss(node, "what is divided by the root is not what has that variance, less its mean")
    return _with_weight_and_bias(normalised, variance)


@dataclass(frozen=True)
class _Variance:
    """`var(x) + eps`."""

    x: Node
    dim: object
    keepdim: object
    is_biased: bool
    eps: object

    def why_not(self) -> str | None:
        if not self.is_biased:
            return "its variance is unbiased, divided by n - 1"
        return why_not_statistics(self.x, what="variance", dim=self.dim, keepdim=self.keepdim, eps=self.eps)


def _variance(node: object) -> _Variance | None:
    total = call_of(node)
    if total is None or total.kind != "add":
        return None
    for moment, eps in either_way(total):
        call = call_of(moment)
        if call is None:
            continue
        if call.kind == "var" and isinstance(call.input, Node):
            is_biased = call["correction"] == 0 if call["correction"] is not None else call["unbiased"] is False
            return _Variance(call.input, call["dim"], call["keepdim"], is_biased, eps)
        if call.kind == "mean" and call["dtype"] is None:
            x = _squared_difference(call.input)
            if x is not None:
                return _Variance(x, call["dim"], call["keepdim"], is_biased=True, eps=eps)
    return None


def _squared_difference(node: object) -> Node | None:
    """X where a node is `(x - mean(x)) ** 2`."""
    power = power_of(node)
    difference = call_of(power[0]) if power is not None else None
    if power is None or power[1] != 2 or difference is None or difference.kind != "sub":
        return None
    x = difference.input
    return x if isinstance(x, Node) and _is_centred(power[0], x) else None


def _is_centred(node: object, x: Node) -> bool:
    """Whether a node is x less its mean over the last dimension."""
    difference, value = call_of(node), value_of(x)
    if difference is None or difference.kind != "sub" or difference["alpha"] != 1 or value is None:
        return False
    mean = call_of(difference["other"])
    return (
        mean is not None
        and mean.kind == "mean"
        and same_value(difference.input, x)
        and same_value(mean.input, x)
        and is_last_dim(mean["dim"], value)
        and mean["keepdim"] is True
        and mean["dtype"] is None
    )


def _with_weight_and_bias(normalised: Node, variance: _Variance) -> Match:
    end = _cast(normalised)
    weight, end = _parameter(end, "mul")
    bias, end = _parameter(end, "add")
    end = _cast(end)
    inputs = (before_widening(variance.x), before_widening(weight), before_widening(bias), number_of(variance.eps))
    return Match(end, inputs, {"dtype": dtype_of(end)})


def _cast(node: Node) -> Node:
    user = only_user(node)
    return user if is_call(user, "cast") and _is_no_wider(user, node) else node


def _is_no_wider(node: Node, than: Node) -> bool:
    """Whether a result is in a float in which the kernel computes: float64 only if that is what it computes in."""
    dtype = dtype_of(node)
    return dtype in (torch.float32, torch.bfloat16, torch.float16) or (dtype == dtype_of(than) == torch.float64)


def _parameter(node: Node, kind: str) -> tuple[Node | None, Node]:
    """A vector of as many elements as a row, and what alone reads `node` and combines the two; or None and `node`."""
    user = only_user(node)
    call, value = call_of(user), value_of(node)
    if call is None or call.kind != kind or value is None:
        return None, node
    for mine, vector in either_way(call):
        found = value_of(vector)
        if mine is not node or found is None or found.ndim != 1 or value.ndim == 0:
            continue
        if same_size(found.shape[0], value.shape[-1]) and _is_no_wider(user, node):
            return vector, user
    return None, node


def _match_call(node: Node, call: Call) -> Match | NearMiss:
    x, made, eps = value_of(call.input), value_of(node), number_of(call["eps"])
    if x is None or made is None:
        return NearMiss(node, "nothing is known of its input")
    if len(call["normalized_shape"]) != 1:
        return NearMiss(node, f"it is over the last {len(call['normalized_shape'])} dimensions")
    if eps is None:
        return NearMiss(node, f"its epsilon is {call['eps']}, not a number")
    return Match(node, (call.input, call["weight"], call["bias"], eps), {"dtype": made.dtype})


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
    triton=(kernel.forward_kernel, kernel.backward_kernel),
    results=3,
)
