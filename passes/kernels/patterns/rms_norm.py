"""RMSNorm as models spell it: transformers' Llama, Gemma and Qwen, `nn.RMSNorm`, `x / sqrt(...)`.

wide = x.float();  wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)        # the anchor is the root
then a cast, a product with `weight` or `1 + weight`, a cast; each may be missing
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.kernels import rms_norm as kernel
from dsgraph.passes.kernels.likeness import Likeness
from dsgraph.passes.kernels.matching import (
    FIT_FLOAT32,
    Call,
    before_widening,
    call_of,
    dtype_of,
    is_call,
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
from dsgraph.passes.kernels.spec import Match, NearMiss, gain_by_fusing, traced_kernel

_OFFSET = Likeness.of(lambda weight, offset: weight + offset, anchor="add")


def is_anchor(node: Node) -> bool:
    """Return whether a node calls `rms_norm`, or is a root of a sum."""
    return is_root(node) or is_call(node, "rms_norm")


def match(node: Node) -> Match | NearMiss | None:
    """Match the norm with the root `node`."""
    call = call_of(node)
    if call is not None and call.kind == "rms_norm":
        return _match_call(node, call)
    found = next((found for spelling in SQUARES for found in spelling.find(call and call.input)), None)
    if found is None:
        return None
    x, power, eps = found["x"], found.arguments.get("power", 2), found["eps"]
    if power != 2:
        return NearMiss(node, f"it is the mean of the power {power}, not of squares")
    reason = why_not_statistics(x, what="mean", dim=found["dim"], keepdim=found["keepdim"], eps=eps)
    if reason is not None:
        return NearMiss(node, reason)
    for divided, quotient in quotients(node):
        if same_value(divided, x):
            return _with_weight(quotient, x, number_of(eps))
    return NearMiss(node, "what was squared is not what is divided by the root")


def _with_weight(end: Node, x: Node, eps: float | None) -> Match:
    cast = only_user(end)
    if is_call(cast, "cast"):
        end = cast
    norm_dtype = dtype_of(end)
    weight, offset, product = _product(end)
    if product is not None:
        end = product
        cast = only_user(end)
        if is_call(cast, "cast"):
            end = cast
    options = {"offset": offset, "norm_dtype": norm_dtype, "dtype": dtype_of(end)}
    return Match(end, (before_widening(x), weight, eps), options)


def _product(normalised: Node) -> tuple[Node | None, float, Node | None]:
    """Return weight, offset, and the product with them that is the only reader of a node; None if there is none."""
    scale, product = with_vector(normalised, "mul") or (None, normalised)
    made, norm_dtype = dtype_of(product), dtype_of(normalised)
    if scale is None or made is None or norm_dtype is None:
        return None, 0.0, None
    weight, offset = _offset(scale) if dtype_of(scale) == made else (scale, 0.0)
    if is_call(weight, "cast") and _is_exact(weight.args[0], norm_dtype, made):
        weight = weight.args[0]
    dtype = dtype_of(weight)
    if dtype is None or torch.promote_types(norm_dtype, dtype) != made:
        return None, 0.0, None
    return weight, offset, product


def _offset(scale: Node) -> tuple[Any, float]:
    """Return `1 + weight` as weight and 1; the kernel does not round the sum, so it must have the product's dtype."""
    for found in _OFFSET.find(scale):
        offset = number_of(found["offset"])
        if offset is not None and dtype_of(found["weight"]) == dtype_of(scale):
            return found["weight"], offset
    return scale, 0.0


def _is_exact(weight: object, norm_dtype: torch.dtype, product: torch.dtype) -> bool:
    """Return whether the kernel widens a weight before the multiplication like the graph does."""
    dtype = dtype_of(weight)
    return (
        dtype in FIT_FLOAT32 and product in (torch.float32, dtype) and torch.promote_types(norm_dtype, dtype) == product
    )


def _match_call(node: Node, call: Call) -> Match | NearMiss:
    x, weight_dtype = value_of(call.input), dtype_of(call["weight"])
    reason = why_not_called_so(call.input, call["normalized_shape"], call["eps"])
    if reason is not None or x is None:
        return NearMiss(node, str(reason))
    if weight_dtype is not None and weight_dtype != x.dtype:
        return NearMiss(node, f"its weight is {weight_dtype} and its input {x.dtype}")
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    eps = torch.finfo(statistics).eps if call["eps"] is None else number_of(call["eps"])
    options = {"offset": 0.0, "norm_dtype": statistics, "dtype": dtype_of(node)}
    return Match(node, (call.input, call["weight"], eps), options)


SPEC = traced_kernel(
    "rms_norm",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=gain_by_fusing(forward=6, backward=12),
    results=2,
)
