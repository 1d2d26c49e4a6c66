"""Rules for lookups in tables and losses over classes with sliced operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from dsgraph.inductor_ext import sliced_cross_entropy, sliced_embedding

from .slices import Outcome, Refusal, Slice, Values

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_CROSS_ENTROPY = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"),
)


def embedding(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of a table sliced along its width, or along its rows: then the ranks' own lookups are summed."""
    call = _bound(node, _EMBEDDING)
    held = values.slice_of(call["weight"])
    if held is None or values.slice_of(call["input"]) is not None:
        return Refusal("an embedding whose ids are sharded")
    if held.dim == 1:
        return Outcome(Slice(len(values.shape_of(node)) - 1, held.parts))
    if held.parts != 1 or call.get("max_norm") is not None or call.get("scale_grad_by_freq") or call.get("sparse"):
        return Refusal("an embedding with max_norm, scale_grad_by_freq or sparse, whose rows are sharded")
    args = (call["input"], call["weight"], call.get("padding_idx"), values.ranks)
    return Outcome(None, target=sliced_embedding, args=args, kwargs={})


def cross_entropy(node: Node, values: Values) -> Outcome | Refusal:
    """Apply the rule of a loss over sliced classes: no rank gathers the logits."""
    call = _bound(node, _CROSS_ENTROPY)
    held = values.slice_of(call["input"])
    shape = values.shape_of(call["input"])
    if held is None or values.slice_of(call["target"]) is not None:
        return Refusal("a loss whose targets are sharded")
    is_plain = all(call.get(name) is None for name in ("weight", "size_average", "reduce"))
    if len(shape) != 2 or held != Slice(1) or len(values.shape_of(call["target"])) != 1:
        return Refusal("a loss whose classes are not the second of two dimensions")
    if not is_plain or call.get("label_smoothing", 0.0):
        return Refusal("a loss with weights of classes, or with smoothed labels")
    rest = (call.get("ignore_index", -100), call.get("reduction", "mean"), values.ranks)
    return Outcome(None, target=sliced_cross_entropy, args=(call["input"], call["target"], *rest), kwargs={})


def _bound(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


VOCABULARY: Mapping[str, Callable[[Node, Values], Outcome | Refusal]] = MappingProxyType(
    {"embedding": embedding, "cross_entropy": cross_entropy}
)
