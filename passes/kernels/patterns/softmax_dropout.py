"""Dropout of a softmax: transformers' `eager_attention_forward`, if the complete attention is not substituted.

z = softmax(scores, dim=-1, dtype=float32).to(dtype)            # the anchor is the softmax; it may be cast or not
y = dropout(z, p, training=True)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Node

from dsgraph.inductor_ext.kernels import softmax_dropout as kernel
from dsgraph.passes.kernels.matching import (
    before_widening,
    call_of,
    dtype_of,
    is_call,
    is_last_dim,
    number_of,
    value_of,
    writes,
)
from dsgraph.passes.kernels.spec import Gain, Match, NearMiss, Setting, gain_of_fusion, traced_kernel

_OTHER_RANDOM_NUMBERS = "its dropout may draw other random numbers than the plain model's"


def is_anchor(node: Node) -> bool:
    """Return whether a node is a softmax."""
    return is_call(node, "softmax")


def match(node: Node) -> Match | NearMiss | None:
    """Match the dropout of the softmax `node`."""
    dropout = next(_dropouts_of(node), None)
    if dropout is None:
        return None
    if writes(dropout):
        return NearMiss(dropout, "its dropout writes to what it is given")
    call = call_of(dropout)
    if call is None or call["training"] is False or call["p"] == 0:
        return None
    p = number_of(call["p"])
    reason = _why_not_dropout(p, call["p"], call["training"]) or _why_not_softmax(node) or _why_shared(call.input)
    if reason is not None:
        return NearMiss(node, reason)
    return _match(node, dropout, p)


def _dropouts_of(softmax: Node) -> Iterator[Node]:
    """Yield the dropouts of a softmax's result, or of a cast of it."""
    for user in softmax.users:
        for reader in (user, *(user.users if is_call(user, "cast") else ())):
            if reader.target is F.dropout or is_call(reader, "dropout"):
                yield reader


def _why_not_dropout(p: float | None, given: object, training: object) -> str | None:
    if p is None:
        return f"its dropout is of {given}, not of a number"
    if training is not True:
        return f"whether its dropout is that of training is {training}, which is not known here"
    return "its dropout leaves nothing" if p == 1 else None


def _why_not_softmax(node: Node) -> str | None:
    call, value = call_of(node), value_of(node)
    source = value_of(call.input) if call is not None else None
    if call is None or value is None or source is None:
        return "nothing is known of its softmax"
    if not is_last_dim(call["dim"], value):
        return f"its softmax is over dimension {call['dim']}, not over the last"
    if torch.promote_types(source.dtype, value.dtype) != value.dtype:
        return f"its softmax rounds {source.dtype} to {value.dtype} before it begins"
    return None


def _why_shared(dropped: Node) -> str | None:
    """Return why the dropped tensor must be stored anyway, or None. The pass checks all but casts."""
    if is_call(dropped, "cast") and len(dropped.users) > 1:
        return f"{dropped.name}, which it computes on the way, is read by others as well"
    return None


def _match(softmax: Node, dropout: Node, p: float | None) -> Match:
    call, made = call_of(softmax), value_of(dropout)
    assert call is not None and made is not None
    options = {"softmax_dtype": dtype_of(softmax), "dtype": made.dtype}
    caveat = _OTHER_RANDOM_NUMBERS if made.device.type != "cpu" else ""
    return Match(dropout, (before_widening(call.input), p), options, caveat)


def _gain(match: Match, setting: Setting) -> Gain:
    """Return the gain: softmax, cast and dropout become a kernel and the draw of its seed.

    In the backward one kernel.
    """
    is_cast = match.options["softmax_dtype"] != match.options["dtype"]
    return gain_of_fusion(setting, forward=1 + is_cast, backward=2 + is_cast)


SPEC = traced_kernel(
    "softmax_dropout",
    kernel,
    is_anchor=is_anchor,
    match=match,
    gain=_gain,
    results=2,
)
