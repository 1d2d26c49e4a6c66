"""The head of a language model and its loss: nanoGPT's and transformers' spellings.

logits = linear(h, w, b)                     # or h @ w.t() + b; the anchor is the cross-entropy
logits = 30 * tanh(logits / 30)              # a soft cap, factors, casts to float32: each may be missing, in any order
logits = logits[:, :-1, :n].view(-1, n)      # some of the rows, the first of the classes
cross_entropy(logits, labels.view(-1))       # or cross_entropy(logits.transpose(1, 2), labels)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from dsgraph.inductor_ext.compat import decompose, size_hint
from dsgraph.inductor_ext.kernels import linear_cross_entropy as kernel
from dsgraph.inductor_ext.kernels.cross_entropy_rows import cross_entropy_rows_kernel
from dsgraph.inductor_ext.kernels.linear_cross_entropy_chunks import least_rows, rows_per_chunk
from dsgraph.inductor_ext.kernels.linear_cross_entropy_whole import LEAST_BYTES, whole_grads, whole_rows
from dsgraph.passes.kernels.heads import Path, follow, has_head, with_classes_last
from dsgraph.passes.kernels.matching import Call, call_of, dtype_of, is_call, value_of
from dsgraph.passes.kernels.spec import Derived, Gain, KernelSpec, Match, NearMiss, Setting


def is_anchor(node: Node) -> bool:
    """Return whether a node calls `cross_entropy`."""
    return is_call(node, "cross_entropy")


def match(node: Node) -> Match | NearMiss | None:
    """Match the head before the cross-entropy `node`; None if there is none."""
    loss = call_of(node)
    if loss is None or not has_head(loss.input):
        return None
    reason = _why_not(loss)
    if reason is not None:
        return NearMiss(node, reason)
    path = Path(node)
    logits = with_classes_last(loss.input, path)
    miss = follow(logits, path) if logits is not None else NearMiss(node, "its classes are not the last dimension")
    if miss is not None:
        return miss
    options = {
        "ignore_index": loss["ignore_index"],
        "reduction": loss["reduction"],
        "label_smoothing": loss["label_smoothing"],
        "softcap": path.softcap,
        "logit_scale": path.scale,
        "dtype": dtype_of(node),
    }
    return Match(node, (path.hidden, path.weight, loss["target"], path.bias), options)


def _why_not(loss: Call) -> str | None:
    target = value_of(loss["target"])
    if target is None:
        return "nothing is known of its targets"
    if target.dtype.is_floating_point:
        return "its targets are probabilities, not numbers of classes"
    if loss["weight"] is not None:
        return "its classes have weights"
    if loss["size_average"] is not None or loss["reduce"] is not None:
        return "it is told how to reduce by size_average or reduce: say reduction=..."
    return None


def _gain(match: Match, setting: Setting) -> Gain:
    loss = call_of(match.node)
    assert loss is not None
    if setting.training and loss["reduction"] == "none":
        return Gain(0, 0, "with reduction='none' it computes the logits twice")
    logits, hidden = value_of(loss.input), value_of(_innermost(match.inputs[0]))
    target = value_of(loss["target"])
    assert logits is not None and hidden is not None and target is not None
    elements, rows, size = (size_hint(number) for number in (logits.numel(), target.numel(), hidden.shape[-1]))
    if elements is None or rows is None or size is None:
        return Gain(0, 0, "how many rows it has is not known")
    classes = elements // max(rows, 1)
    item = min(logits.element_size(), hidden.element_size())
    held = elements * item * (2 if setting.training else 1)  # and their gradient
    step = rows_per_chunk(rows, max(classes, 1), size, least=least_rows(setting.device_type))
    sums = classes * size * 4 if setting.training and item == 2 and step < rows else 0
    spared = held - step * classes * item - sums
    if spared < LEAST_BYTES:
        return Gain(0, 0, f"its logits take less than {LEAST_BYTES >> 20} MiB more than the kernel does")
    return Gain(0, spared, "no logits in memory")


def _innermost(item: Any) -> Any:
    while isinstance(item, Derived):
        item = item.args[0]
    return item


def _register() -> None:
    decompose(torch.ops.dsgraph.linear_cross_entropy_grads.default, whole_grads, at_times=True)
    decompose(torch.ops.dsgraph.linear_cross_entropy_rows.default, whole_rows, at_times=True)


SPEC = KernelSpec(
    name="linear_cross_entropy",
    op=torch.ops.dsgraph.linear_cross_entropy.default,
    reference=kernel.reference,
    is_anchor=is_anchor,
    match=match,
    gain=_gain,
    supports=kernel.supports,
    register=_register,
    triton=(cross_entropy_rows_kernel,),
)
