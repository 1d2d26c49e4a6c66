"""The rule for products with quantized weights of which each rank holds a slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from dsgraph.inductor_ext import multiply_own_weight

from .slices import Outcome, Refusal, Slice, Values


def multiply_sliced_weight(node: Node, values: Values) -> Outcome | Refusal:
    """Return columns of the result if outputs are sliced, or a term of the sum over ranks if inputs are."""
    rest: Any = node.args
    x, packed, scale, least, dim, parts = rest[:6]
    held, own = values.slice_of(x), Slice(len(values.shape_of(x)) - 1, parts)
    call: dict[str, Any] = {"target": multiply_own_weight, "args": (x, packed, scale, least), "kwargs": {}}
    if dim == 0 and held is None:
        return Outcome(own, **call)
    if dim == 1 and held in (None, own):
        return Outcome(None, {x: own} if held is None else {}, is_partial=True, **call)
    return Refusal("a matmul with a quantized weight whose input is sharded in another way")


FEW_BITS: Mapping[str, Callable[[Node, Values], Outcome | Refusal]] = MappingProxyType(
    dict.fromkeys(("multiply_sliced_weight", "multiply_sliced_weight.default"), multiply_sliced_weight)
)
