"""One batched product of block-sparse attention: queries `[g, m, d]` over keys `[g, s, d]` that were gathered for them.

    scores = scale * q @ k^T + bias where allowed, else nothing
    y      = dropout(softmax(scores)) @ v

torch's fused CPU kernels compute it if they can. They have no dropout and no gradient of a bias: then it is written
out, and its scores are in memory, chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import cpu_attention, cpu_attention_backward


@dataclass(frozen=True)
class ScoreTerms:
    """The terms for the scores of one product.

    Attributes:
        scale: Their factor.
        allowed: The visible ones, bool, broadcast over `[g, m, s]`; None: all.
        bias: Added to the scores, broadcast like `allowed`; None: no bias.
        kept: For dropout, bool `[g, m, s]`; None: no dropout.
        dropout_p: The dropped share.
    """

    scale: float
    allowed: Tensor | None = None
    bias: Tensor | None = None
    kept: Tensor | None = None
    dropout_p: float = 0.0

    def empty_rows(self) -> Tensor | None:
        """Return the rows without visible scores, broadcast over `[g, m, 1]`; their result is 0."""
        return None if self.allowed is None else ~self.allowed.any(-1, keepdim=True)

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """Return mask and bias as one term, in `dtype`."""
        if self.allowed is None:
            return None if self.bias is None else self.bias.to(dtype)
        base = torch.zeros((), dtype=dtype) if self.bias is None else self.bias.to(dtype)
        return torch.where(self.allowed, base, _nothing(dtype))


def _nothing(dtype: torch.dtype) -> float:
    """Return a score that hides an element and is finite: a row with only such scores has no NaN."""
    return -65504.0 if dtype == torch.float16 else -1e30


def fused_forward(q: Tensor, k: Tensor, v: Tensor, terms: ScoreTerms) -> tuple[Tensor, Tensor]:
    """Return the result, and the logarithm of the sum of exponentials `[g, m]`."""
    y, sums = cpu_attention(q, k, v, added=terms.added(q.dtype), scale=terms.scale)
    empty = terms.empty_rows()
    return (y if empty is None else y.masked_fill(empty, 0)), sums


def fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, terms: ScoreTerms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    empty = terms.empty_rows()
    grad = grad if empty is None else grad.masked_fill(empty, 0)
    return cpu_attention_backward(grad, q, k, v, y, sums, added=terms.added(q.dtype), scale=terms.scale)


def written_forward(q: Tensor, k: Tensor, v: Tensor, terms: ScoreTerms) -> tuple[Tensor, Tensor]:
    """Return the same as `fused_forward`, with support for all fields of `terms`."""
    scores = _scores(q, k, terms)
    sums = scores.logsumexp(-1)
    probabilities = _dropped(scores.sub_(sums[..., None]).exp_(), terms)
    y = probabilities @ v.to(scores.dtype)
    empty = terms.empty_rows()
    return (y if empty is None else y.masked_fill(empty, 0)).to(q.dtype), sums


def written_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, terms: ScoreTerms
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the scores, which include a bias; the last one is `[g, m, s]`."""
    probabilities = _scores(q, k, terms).sub_(sums[..., None]).exp_()
    wide = probabilities.dtype
    grad, q, k, v, y = (item.to(wide) for item in (grad, q, k, v, y))
    empty = terms.empty_rows()
    grad = grad if empty is None else grad.masked_fill(empty, 0)
    dv = _dropped(probabilities, terms).mT @ grad
    rows = (grad * y).sum(-1, keepdim=True)
    dscores = _dropped(grad @ v.mT, terms).sub_(rows).mul_(probabilities)
    return (dscores @ k) * terms.scale, (dscores.mT @ q) * terms.scale, dv, dscores


def _scores(q: Tensor, k: Tensor, terms: ScoreTerms) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (q.to(wide) @ k.to(wide).mT).mul_(terms.scale)
    added = terms.added(wide)
    return scores if added is None else scores.add_(added)


def _dropped(values: Tensor, terms: ScoreTerms) -> Tensor:
    if terms.kept is None:
        return values
    kept = terms.kept.to(values.dtype)
    return values * (kept.div_(1 - terms.dropout_p) if terms.dropout_p < 1 else kept)
