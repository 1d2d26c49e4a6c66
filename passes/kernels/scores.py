"""Recognition of an attention's scores: from the input of the softmax back to the product of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.symbolic_sizes import same_shape, same_size

from .masks import OVERWHELMING, constant_of
from .matching import Call, call_of, dtype_of, either_way, is_call, number_of, value_of
from .spec import NearMiss

# How many calls may lie between a softmax and the product of queries and keys.
_MOST_STEPS = 8


@dataclass(frozen=True)
class Scores:
    """`q @ keys * scale`, with a bias or a mask, or neither.

    Attributes:
        product: `q @ keys`.
        q: Queries, before they are scaled.
        keys: Keys, transposed, before they are scaled.
        scale: The factor of the scores.
        bias: The tensor that is added to them.
        mask: The mask of the replaced scores.
        keeps: True if the mask is True for the other scores.
        fill: The value that replaces them.
    """

    product: Node
    q: Node
    keys: Node
    scale: float
    bias: Node | None = None
    mask: Node | None = None
    keeps: bool = True
    fill: float = -math.inf

    @property
    def is_masked(self) -> bool:
        """True if it has a bias or a mask."""
        return self.bias is not None or self.mask is not None

    def why_not(self) -> str | None:
        """Return why the kernel does not compute these scores, or None."""
        q, keys, product = value_of(self.q), value_of(self.keys), value_of(self.product)
        if q is None or keys is None or product is None:
            return "nothing is known of its queries and keys"
        if self.scale <= 0:
            return f"its scores are scaled by {self.scale}, which the kernel takes to be above 0"
        if q.ndim != keys.ndim or not all(map(same_size, q.shape[:-2], keys.shape[:-2])):
            return "its queries and keys are broadcast against each other"
        if self.bias is not None and dtype_of(self.bias) != product.dtype:
            return f"what is added to its scores is {dtype_of(self.bias)}, and they are {product.dtype}"
        if self.mask is not None and dtype_of(self.mask) != torch.bool:
            return f"its mask is {dtype_of(self.mask)}, not bool"
        if self.mask is not None and self.fill > -OVERWHELMING:
            return f"its masked scores are {self.fill}, which others may come near to"
        if self.mask is not None and self.fill != -math.inf and product.dtype == torch.float16:
            return f"its masked scores are {self.fill}, which float16 does not tell from other scores"
        return None


def read_scores(node: object, steps: int = _MOST_STEPS) -> Scores | NearMiss | None:
    """Read scores from their end to the product at their beginning.

    Args:
        node: The input of the softmax.
        steps: Largest number of calls in between.

    Returns:
        The scores, or a near miss; None if they do not begin with a product.
    """
    call = call_of(node)
    if not isinstance(node, Node) or call is None:
        return _unknown(node)
    if steps == 0:
        return None
    if call.kind == "matmul" and isinstance(call["other"], Node):
        return _product(node, call)
    if call.kind == "cast":
        return _cast(node, read_scores(call.input, steps - 1))
    if call.kind in ("mul", "div"):
        return _scaled(node, call, steps - 1)
    if call.kind == "add":
        for scores, bias in either_way(call):
            if isinstance(inner := read_scores(scores, steps - 1), Scores):
                return _with(node, inner, bias=bias)
        return None
    if call.kind == "masked_fill":
        return _with(node, read_scores(call.input, steps - 1), **_masking(call["mask"], call["value"], keeps=False))
    if call.kind == "where":
        return _with(
            node, read_scores(call["input"], steps - 1), **_masking(call["condition"], call["other"], keeps=True)
        )
    return _unknown(node)


def _masking(mask: object, value: object, *, keeps: bool) -> dict[str, Any]:
    return {"mask": mask, "keeps": keeps, "fill": constant_of(value)}


def _cast(node: Node, scores: Scores | NearMiss | None) -> Scores | NearMiss | None:
    if not isinstance(scores, Scores):
        return scores
    plain, dtype = dtype_of(scores.product), dtype_of(node)
    if plain is None or dtype is None or torch.promote_types(plain, dtype) != dtype:
        return NearMiss(node, f"its scores are rounded to {dtype}")
    return NearMiss(node, f"{node.name}, its scores, is read by others as well") if len(node.users) > 1 else scores


def _unknown(node: object) -> NearMiss | None:
    """Return a near miss if an unknown call works on a product."""
    if not isinstance(node, Node) or is_call(node, "softmax", "dropout", "linear") or node.op == "placeholder":
        return None
    if any(is_call(item, "matmul") for item in node.all_input_nodes[:1]):
        return NearMiss(node, f"what {node.name} does to its scores is not known here")
    return None


def _product(node: Node, call: Call) -> Scores:
    q, q_scale = _without_scale(call.input)
    keys, k_scale = _without_scale(call["other"])
    return Scores(node, q, keys, q_scale * k_scale)


def _without_scale(node: Node) -> tuple[Node, float]:
    call = call_of(node)
    factor = _factor(call) if call is not None else None
    if call is None or factor is None or dtype_of(factor[0]) != dtype_of(node):
        return node, 1.0
    return factor


def _factor(call: Call) -> tuple[Node, float] | None:
    """Return the tensor that a call multiplies by a number, and the number."""
    if call.kind == "mul":
        for item, number in either_way(call):
            if isinstance(item, Node) and (factor := number_of(number)) is not None and math.isfinite(factor):
                return item, factor
    if call.kind == "div" and call["rounding_mode"] is None and isinstance(call.input, Node):
        divisor = number_of(call["other"])
        return (call.input, 1 / divisor) if divisor else None
    return None


def _scaled(node: Node, call: Call, steps: int) -> Scores | NearMiss | None:
    factor = _factor(call)
    if factor is None:
        operands = (call["input"], call["other"])
        is_near = any(isinstance(read_scores(item, steps), Scores) for item in operands)
        return NearMiss(node, "its scores are scaled by a tensor") if is_near else None
    inner = read_scores(factor[0], steps)
    if not isinstance(inner, Scores):
        return inner
    if inner.is_masked and factor[1] != 1:
        return NearMiss(node, "its scores are scaled after they are masked")
    return replace(inner, scale=inner.scale * factor[1])


def _with(node: Node, scores: Scores | NearMiss | None, **added: Any) -> Scores | NearMiss | None:
    if not isinstance(scores, Scores):
        return scores
    if scores.is_masked:
        return NearMiss(node, "two masks or biases work on its scores")
    made, plain = value_of(node), value_of(scores.product)
    if made is None or plain is None or not same_shape(made, plain):
        return NearMiss(node, "its mask has more dimensions than its scores")
    if not all(isinstance(added.get(name, node), Node) for name in ("bias", "mask")):
        return NearMiss(node, "a number is added to its scores")
    if added.get("fill", 0.0) is None:
        return NearMiss(node, "its masked scores are not a number that is known here")
    return replace(scores, **added)
