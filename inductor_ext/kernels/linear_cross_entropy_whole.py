"""`linear_cross_entropy` of few logits, as Inductor traces it: all rows at once, so that the ops in between are fused.

The chunks of `linear_cross_entropy_chunks` save memory, and process the logits op by op. If the logits take little
memory there is nothing to save, and one fused kernel between the products is faster. The formulas are those of
`cross_entropy_rows`, without writing in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cross_entropy_rows import LossTerms
from .launch import wide_dtype
from .linear_cross_entropy_chunks import logits_of

LEAST_BYTES = 16 * 2**20
"""Least size of logits for which chunks are used: smaller ones are computed at once, or left to plain torch."""


def whole_grads(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_weights: Tensor,
    *,
    needs: Sequence[bool],
    **options: Any,
) -> Any:
    """Compute `linear_cross_entropy_grads`; return NotImplemented if that op is better."""
    if _prefers_chunks(hidden, weight):
        return NotImplemented
    terms = LossTerms(**options)
    ignored = target == terms.ignore_index
    weights = (row_weights * terms.logit_scale).masked_fill(ignored, 0)[:, None]
    parts = _Rows(logits_of(hidden, weight, bias), target, ignored, terms)
    total = (parts.losses() * row_weights).sum()
    d_logits = parts.d_logits(weights).to(hidden.dtype)
    d_hidden = d_logits @ weight if needs[0] else hidden.new_empty(0)
    d_weight = d_logits.t() @ hidden if needs[1] else hidden.new_empty(0)
    d_bias = d_logits.sum(0, dtype=parts.x.dtype).to(hidden.dtype) if needs[2] else hidden.new_empty(0)
    return total, d_hidden, d_weight, d_bias


def whole_rows(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> Any:
    """Compute `linear_cross_entropy_rows`; return NotImplemented if that op is better."""
    if _prefers_chunks(hidden, weight):
        return NotImplemented
    terms = LossTerms(**options)
    return _Rows(logits_of(hidden, weight, bias), target, target == terms.ignore_index, terms).losses()


def _prefers_chunks(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether there are many, or unknown numbers of, logits; on a GPU the chunks' kernel is fused anyway.

    In float16 the chunks keep gradients from becoming too small.
    """
    sizes: tuple[object, ...] = (hidden.shape[0], weight.shape[0])
    if not all(isinstance(size, int) for size in sizes):
        return True
    few = 0 < hidden.shape[0] * weight.shape[0] * wide_dtype(hidden.dtype).itemsize <= LEAST_BYTES
    return not few or hidden.device.type != "cpu" or hidden.dtype is torch.float16


class _Rows:
    """Losses of rows, and the gradient of their logits, with shared intermediate results.

    Attributes:
        x: `[rows, V]`, logits scaled and capped, in the wide dtype.
    """

    def __init__(self, logits: Tensor, target: Tensor, ignored: Tensor, terms: LossTerms) -> None:
        scaled = logits.to(wide_dtype(logits.dtype)) * terms.logit_scale
        self.x = scaled if terms.softcap is None else terms.softcap * torch.tanh(scaled / terms.softcap)
        self._terms, self._ignored = terms, ignored
        self._target = target.masked_fill(ignored, 0)[:, None]
        self._lse = torch.logsumexp(self.x, 1, keepdim=True)

    def losses(self) -> Tensor:
        """Return the losses, `[rows]`."""
        terms = self._terms
        loss = self._lse - (1 - terms.label_smoothing) * self.x.gather(1, self._target)
        if terms.label_smoothing:
            loss = loss - terms.label_smoothing * self.x.mean(1, keepdim=True)
        if terms.z_loss:
            loss = loss + terms.z_loss * self._lse * self._lse
        return loss.squeeze(1).masked_fill(self._ignored, 0)

    def d_logits(self, weights: Tensor) -> Tensor:
        """Return the gradient of the logits, `[rows, V]`; `weights` `[rows, 1]` include the scale of the logits."""
        terms, x = self._terms, self.x
        is_target = torch.arange(x.shape[1], device=x.device) == self._target
        d = (1 + 2 * terms.z_loss * self._lse) * torch.exp(x - self._lse)
        d = d - (1 - terms.label_smoothing) * is_target.to(x.dtype)
        if terms.label_smoothing:
            d = d - terms.label_smoothing / x.shape[1]
        if terms.softcap is not None:
            d = d * (1 - (x / terms.softcap) ** 2)
        return d * weights
