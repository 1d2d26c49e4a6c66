"""Attention in captured graphs: calls of torch's function, and attention written out in models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F  # noqa: N812 - as users write it
from torch.fx import Node

from dsgraph.inductor_ext.symbolic_sizes import same_size

from .capture_graph import why_unsafe
from .mask_terms import MaskTerms, mask_of_bias, terms_of
from .matching import call_of, number_of, value_of
from .patterns import attention as written
from .spec import Match, NearMiss

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class FoundAttention:
    """An attention.

    Attributes:
        node: The node of its value.
        q: Queries `[b, heads, l, d]`.
        k: Keys `[b, heads of keys, l, d]`.
        v: Values `[b, heads of keys, l, e]`.
        keys_are_transposed: True if `k` is `[..., d, l]`, as in a product.
        mask: True for visible keys: as terms of an `and`; without terms if all are.
        hidden: A mask that is True for hidden keys; None if there is none.
        bias: Added to the scores; None for none.
        scale: The factor of the scores.
        dropout_p: The share of probabilities that is dropped.
    """

    node: Node
    q: Node
    k: Node
    v: Node
    keys_are_transposed: bool
    mask: MaskTerms
    hidden: Node | None
    bias: Node | None
    scale: float
    dropout_p: float


def find_attention(node: Node) -> FoundAttention | NearMiss | None:
    """Return the attention whose call of torch's function, or softmax, is `node`; or why not; None for other nodes."""
    if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
        return _of_function(node)
    if node.op == "call_function" and node.target is F.multi_head_attention_forward:
        return NearMiss(node, "it is one call of nn.MultiheadAttention, which is not taken apart")
    if not written.is_anchor(node):
        return None
    answer = written.match(node)
    return _of_match(answer) if isinstance(answer, Match) else answer


def before_repeating(node: Node) -> Node:
    """Return the heads of keys before they were repeated for several heads of queries, or the node itself."""
    call = call_of(node)
    expanded = call_of(call.input) if call is not None and call.kind == "reshape" else None
    lifted = call_of(expanded.input) if expanded is not None and expanded.kind == "expand" else None
    if lifted is None or lifted.kind != "getitem" or not isinstance(lifted.input, Node):
        return node
    source, made, index = value_of(lifted.input), value_of(node), lifted["index"]
    whole = slice(None)
    if source is None or made is None or source.ndim != 4 or made.ndim != 4 or not isinstance(index, tuple):
        return node
    repeats = index[:3] == (whole, whole, None) and all(item == whole for item in index[3:])
    fits = all(map(same_size, (source.shape[0], *source.shape[2:]), (made.shape[0], *made.shape[2:])))
    return lifted.input if repeats and fits else node


def _of_function(node: Node) -> FoundAttention | NearMiss:
    given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    q, k, v = given["query"], given["key"], given["value"]
    values = [value_of(item) for item in (q, k, v)]
    dropout_p, width = number_of(given.get("dropout_p", 0.0)), None if values[0] is None else values[0].shape[-1]
    if any(value is None for value in values) or dropout_p is None or not isinstance(width, int):
        return NearMiss(node, "nothing is known of its queries and keys, or of its dropout")
    scale = number_of(given.get("scale"))
    mask, hidden, bias = _taken_apart(given.get("attn_mask"))
    mask.causal = mask.causal or bool(given.get("is_causal", False))
    return FoundAttention(
        *(node, q, k, v),
        keys_are_transposed=False,
        mask=mask,
        hidden=hidden,
        bias=bias,
        scale=1 / math.sqrt(width) if scale is None else scale,
        dropout_p=dropout_p,
    )


def _of_match(match: Match) -> FoundAttention | NearMiss:
    q, keys, v, bias, masked = match.inputs
    reason = why_unsafe(match.node, [item for item in match.inputs if item is not None])
    if reason is not None:
        return NearMiss(match.node, reason)
    mask, hidden, added = MaskTerms(), None, None
    if masked is not None:
        mask, hidden = (terms_of(masked), None) if match.options["keeps"] else (mask, masked)
    elif bias is not None:
        mask, hidden, added = _taken_apart(bias)
    mask.causal = mask.causal or match.options["causal"]
    k, is_transposed = keys, True
    call = call_of(keys)
    if call is not None and call.kind == "transpose" and {call["dim0"] % 4, call["dim1"] % 4} == {2, 3}:
        k, is_transposed = call.input, False
    return FoundAttention(
        *(match.node, q, k, v),
        keys_are_transposed=is_transposed,
        mask=mask,
        hidden=hidden,
        bias=added,
        scale=match.options["scale"],
        dropout_p=match.options["dropout_p"],
    )


def _taken_apart(given: object) -> tuple[MaskTerms, Node | None, Node | None]:
    """Return the terms of a mask, a mask of hidden keys, and a bias, for an argument of either kind."""
    value = value_of(given)
    if not isinstance(given, Node) or value is None:
        return MaskTerms(), None, None
    if not value.dtype.is_floating_point:
        return terms_of(given), None, None
    meant = mask_of_bias(given)
    if meant is None:
        return MaskTerms(), None, given
    mask, keeps = meant
    return (terms_of(mask), None, None) if keeps else (MaskTerms(), mask, None)
