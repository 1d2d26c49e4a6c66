"""Attention as models write it out: nanoGPT, GPT-2, BERT, transformers' `eager_attention_forward`.

scores = q @ k.transpose(-2, -1) * scale + mask           # or masked_fill, where; q or k may be scaled instead
y = dropout(softmax(scores, -1, dtype=float32).to(dtype)) @ v           # the anchor is the softmax
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import Tensor
from torch.fx import Node

from dsgraph.inductor_ext.compat import size_hint
from dsgraph.inductor_ext.kernels import attention as kernel
from dsgraph.inductor_ext.symbolic_sizes import same_size
from dsgraph.passes.kernels.masks import is_causal, is_causal_bias, is_finite, is_small, leaves_each_row_a_score
from dsgraph.passes.kernels.matching import Call, call_of, dtype_of, is_call, is_last_dim, number_of, value_of
from dsgraph.passes.kernels.scores import Scores, read_scores
from dsgraph.passes.kernels.spec import Gain, KernelSpec, Match, NearMiss, Setting

_OTHER_RANDOM_NUMBERS = "its dropout may draw other random numbers than the plain model's"
_EMPTY_ROWS = "nothing proves that its mask leaves each row a score, and a row without one is 0 instead of nan"
_GRADIENT = "nothing proves that its mask leaves each row a score, and a row without one passes on another gradient"


def is_anchor(node: Node) -> bool:
    """Return whether a node is a softmax."""
    return is_call(node, "softmax")


def match(node: Node) -> Match | NearMiss | None:
    """Match the attention with the softmax `node`."""
    behind = _behind(node)
    call = call_of(node)
    scores = read_scores(call.input) if behind is not None and call is not None else None
    if behind is None or call is None or not isinstance(scores, Scores):
        return scores if isinstance(scores, NearMiss) else None
    reason = _why_not_softmax(node, call, scores) or behind.why_not(scores) or scores.why_not()
    if reason is not None:
        return NearMiss(node, reason)
    return _match(scores, behind)


@dataclass(frozen=True)
class _Behind:
    """The calls after the softmax: `dropout(probabilities).to(dtype) @ v`."""

    product: Node
    v: Node
    dropout_p: object
    shared: Node | None

    def why_not(self, scores: Scores) -> str | None:
        if number_of(self.dropout_p) is None:
            return f"its dropout is of {self.dropout_p}, not of a number"
        if self.shared is not None:
            return f"{self.shared.name}, which it computes on the way, is read by others as well"
        v, plain = value_of(self.v), value_of(scores.product)
        if v is None or plain is None:
            return "nothing is known of its values"
        if v.ndim != plain.ndim or not all(map(same_size, v.shape[:-2], plain.shape[:-2])):
            return "its values are broadcast over its scores, or its scores over them"
        if dtype_of(self.product) != dtype_of(scores.product):
            return f"its scores are {dtype_of(scores.product)} and its result {dtype_of(self.product)}"
        return None


def _behind(softmax: Node) -> _Behind | None:
    node, dropout_p, shared = softmax, 0.0, None
    while True:
        found = [(user, call) for user in node.users if (call := call_of(user)) is not None and call.input is node]
        for user, call in found:
            if call.kind == "matmul" and isinstance(call["other"], Node):
                return _Behind(user, call["other"], dropout_p, shared)
        step = next(((user, call) for user, call in found if call.kind in ("cast", "dropout", "contiguous")), None)
        if step is None:
            return None
        node, call = step
        if len(node.users) > 1:
            shared = node
        if call.kind == "dropout" and call["training"]:
            if dropout_p != 0:
                return None
            dropout_p = call["p"]


def _why_not_softmax(node: Node, call: Call, scores: Scores) -> str | None:
    value, plain = value_of(node), dtype_of(scores.product)
    if value is None or plain is None:
        return "nothing is known of its scores"
    if not is_last_dim(call["dim"], value):
        return f"its softmax is over dimension {call['dim']}, not over the last"
    if value.dtype == torch.float64 and plain != torch.float64:
        return f"its softmax is in float64, and the kernel's for {plain} in float32"
    return None


def _match(scores: Scores, behind: _Behind) -> Match:
    product = value_of(scores.product)
    assert product is not None
    causal, bias, mask = _is_causal(scores, product), scores.bias, scores.mask
    if causal:
        bias = mask = None
    dropout_p = number_of(behind.dropout_p) or 0.0
    caveats = [_OTHER_RANDOM_NUMBERS] * (dropout_p > 0) + ([] if causal else _caveats_of_the_mask(scores, product))
    options = {
        "keeps": scores.keeps,
        "fill": scores.fill if math.isinf(scores.fill) else max(scores.fill, torch.finfo(product.dtype).min),
        "scale": scores.scale,
        "dropout_p": dropout_p,
        "causal": causal,
        "dtype": product.dtype,
        "contiguous": not _reads_any_layout(behind.product),
    }
    return Match(behind.product, (scores.q, scores.keys, behind.v, bias, mask), options, "; ".join(caveats))


def _is_causal(scores: Scores, product: Tensor) -> bool:
    if not _is_square(scores, product):
        return False
    return is_causal_bias(scores.bias) if scores.mask is None else is_causal(scores.mask, keeps=scores.keeps)


def _is_square(scores: Scores, product: Tensor) -> bool:
    """Return whether its mask or bias has one row for each query and one column for each key."""
    value = value_of(scores.bias if scores.mask is None else scores.mask)
    sizes = value.shape[-2:] if value is not None and value.ndim > 1 else ()
    return len(sizes) == 2 and all(same_size(size, product.shape[-1]) for size in (*sizes, product.shape[-2]))


def _caveats_of_the_mask(scores: Scores, product: Tensor) -> list[str]:
    """Return the caveats about rows without visible keys, unless it is proved that there are none."""
    if not scores.is_masked:
        return []
    if _is_square(scores, product):
        if scores.mask is not None and leaves_each_row_a_score(scores.mask, keeps=scores.keeps):
            return []
        if scores.mask is None and leaves_each_row_a_score(scores.bias):
            return []
    if scores.mask is None and is_small(scores.bias):
        return []
    is_infinite = scores.fill == -math.inf if scores.mask is not None else not is_finite(scores.bias)
    if is_infinite:
        return [_EMPTY_ROWS]
    # For the backward torch's kernels keep the logarithm of a row's sum, which vanishes next to a score of -3e38.
    return [_GRADIENT] if product.requires_grad else []


def _reads_any_layout(node: Node) -> bool:
    """Return whether all readers copy it into another order anyway, as `transpose(1, 2).contiguous()` does."""
    return all(
        is_call(user, "transpose")
        and all(next_.target in ("contiguous", "reshape", torch.reshape) for next_ in user.users)
        for user in node.users
    )


def _gain(match: Match, setting: Setting) -> Gain:
    q, keys, v, bias = (value_of(item) for item in match.inputs[:4])
    assert q is not None and keys is not None and v is not None
    reason = _why_not_fused(q, v, bias, match, setting)
    if reason is not None:
        return Gain(0, 0, reason)
    sizes = [size_hint(size) or 1 for size in (*q.shape[:-1], keys.shape[-1])]
    width = match.options["dtype"].itemsize
    if setting.training and match.options["dropout_p"] > 0:
        width = 2 * width + 1  # probabilities, those that are left, and which those are
    return Gain(0, math.prod(sizes) * width, "its probabilities are not stored")


def _why_not_fused(q: Tensor, v: Tensor, bias: Tensor | None, match: Match, setting: Setting) -> str | None:
    """Return why torch (2.11 to 2.13) has no kernel for it that stores no scores, or None."""
    if setting.device_type not in ("cpu", "cuda"):
        return f"what torch does on {setting.device_type} is not known here"
    if setting.device_type == "cpu" and match.options["dropout_p"] > 0:
        return "with dropout torch stores the scores on the CPU as well"
    if setting.device_type == "cpu" and bias is not None and bias.requires_grad:
        return "for the gradient of its bias torch stores the scores on the CPU as well"
    if setting.device_type == "cuda" and match.options["dtype"] == torch.float64:
        return "in float64 torch stores the scores as well"
    if not same_size(q.shape[-1], v.shape[-1]):
        return "where values are not as wide as keys torch may store the scores as well"
    return None


SPEC = KernelSpec(
    name="attention",
    op=torch.ops.dsgraph.attention.default,
    reference=kernel.reference,
    is_anchor=is_anchor,
    match=match,
    gain=_gain,
    supports=kernel.supports,
    takes_from=("softmax_dropout",),
    already=F.scaled_dot_product_attention,
)
