"""RMSNorm as models spell it: transformers' Llama, Gemma and Qwen, `nn.RMSNorm`, `x / sqrt(...)`.

wide = x.float();  wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)        # the anchor is the root
then a cast, a product with `weight` or `1 + weight`, a cast; each may be missing
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.kernels import rms_norm as kernel
from dsgraph.inductor_ext.sizes import same_size
from dsgraph.passes.kernels.matching import (
    FIT_FLOAT32,
    Call,
    before_widening,
    call_of,
    dtype_of,
    either_way,
    is_call,
    number_of,
    only_user,
    same_value,
    value_of,
)
from dsgraph.passes.kernels.norms import divided_by, is_root, power_of, why_not_statistics
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel


def is_anchor(node: Node) -> bool:
    """A call of `rms_norm`, or a root of a sum."""
    return is_root(node) or is_call(node, "rms_norm")


def match(node: Node) -> Match | NearMiss | None:
    """Finds the norm of which `node` is the root."""
    call = call_of(node)
    if call is None:
        return None
    if call.kind == "rms_norm":
        return _match_call(node, call)
    squares = _mean_of_powers(call.input)
    if squares is None:
        return None
    reason = squares.why_not()
    if reason is not None:
        return NearMiss(node, reason)
    normalised = divided_by(node, lambda numerator: same_value(numerator, squares.x))
    if normalised is None:
        return NearMiss(node, "what was squared is not what is divided by the root")
    return _with_weight(normalised, squares)


@dataclass(frozen=True)
class _Squares:
    """`mean(x ** power, dim, keepdim) + eps`."""

    x: Node
    power: object
    dim: object
    keepdim: object
    eps: object

    def why_not(self) -> str | None:
        if self.power != 2:
            return f"it is the mean of the power {self.power}, not of squares"
        return why_not_statistics(self.x, what="mean", dim=self.dim, keepdim=self.keepdim, eps=self.eps)


def _mean_of_powers(node: object) -> _Squares | None:
    total = call_of(node)
    if total is None or total.kind != "add":
        return None
    for mean, eps in either_way(total):
        call = call_of(mean)
        if call is not None and call.kind == "mean" and call["dtype"] is None:
            base = power_of(call.input)
            if base is not None:
                return _Squares(base[0], base[1], call["dim"], call["keepdim"], eps)
    return None


def _with_weight(normalised: Node, squares: _Squares) -> Match:
    statistics = dtype_of(squares.x)
    assert statistics is not None
    end, norm_dtype = normalised, statistics
    cast = only_user(end)
    if is_call(cast, "cast"):
        end, norm_dtype = cast, dtype_of(cast) or statistics
    weight, offset, product = _product(end, norm_dtype)
    if product is not None:
        end = product
        cast = only_user(end)
        if is_call(cast, "cast"):
            end = cast
    options = {"offset": offset, "norm_dtype": norm_dtype, "dtype": dtype_of(end)}
    return Match(end, (before_widening(squares.x), weight, number_of(squares.eps)), options)


def _product(node: Node, norm_dtype: Any) -> tuple[Node | None, float, Node | None]:
    """Weight, offset, and the product with them that is the only use of `node`; None where there is none."""
    user = only_user(node)
    call = call_of(user)
    if call is None or call.kind != "mul":
        return None, 0.0, None
    for mine, scale in either_way(call):
        value = value_of(scale)
        if mine is not node or value is None or value.ndim != 1 or scale is node:
            continue
        if not same_size(value.shape[0], _columns(node)):
            continue
        weight, offset = _offset(scale) if dtype_of(scale) == dtype_of(user) else (scale, 0.0)
        source = call_of(weight)
        if source is not None and source.kind == "cast" and _is_exact(source.input, norm_dtype, dtype_of(user)):
            weight = source.input
        dtype = dtype_of(weight)
        if dtype is not None and torch.promote_types(norm_dtype, dtype) == dtype_of(user):
            return weight, offset, user
    return None, 0.0, None


def _columns(node: Node) -> Any:
    value = value_of(node)
    assert value is not None
    return value.shape[-1]


def _offset(scale: Node) -> tuple[Node, float]:
    """`1 + weight` as weight and 1; the kernel does not round the sum, so it must be of the product's dtype."""
    call = call_of(scale)
    if call is not None and call.kind == "add":
        for weight, number in either_way(call):
            offset = number_of(number)
            if offset is not None and isinstance(weight, Node) and dtype_of(weight) == dtype_of(scale):
                return weight, offset
    return scale, 0.0


def _is_exact(weight: object, norm_dtype: Any, product: Any) -> bool:
    """Whether the kernel widens a weight as the graph does before it multiplies."""
    dtype = dtype_of(weight)
    return (
        dtype in FIT_FLOAT32 and product in (torch.float32, dtype) and torch.promote_types(norm_dtype, dtype) == product
    )


def _match_call(node: Node, call: Call) -> Match | NearMiss:
    x, made = value_of(call.input), value_of(node)
    if x is None or made is None:
        return NearMiss(node, "nothing is known of its input")
    if len(call["normalized_shape"]) != 1:
        return NearMiss(node, f"it is over the last {len(call['normalized_shape'])} dimensions")
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight_dtype = dtype_of(call["weight"])
    if weight_dtype is not None and weight_dtype != x.dtype:
        return NearMiss(node, f"its weight is {weight_dtype} and its input {x.dtype}")
    eps = torch.finfo(statistics).eps if call["eps"] is None else number_of(call["eps"])
    if eps is None:
        return NearMiss(node, f"its epsilon is {call['eps']}, not a number")
    options = {"offset": 0.0, "norm_dtype": statistics, "dtype": made.dtype}
    return Match(node, (call.input, call["weight"], eps), options)


SPEC = traced_kernel(
    "rms_norm",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=gain_by_fusing(forward=6, backward=12),
    triton=(kernel.forward_kernel, kernel.backward_kernel),
    results=2,
)
