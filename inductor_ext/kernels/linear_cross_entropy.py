"""`dsgraph::linear_cross_entropy`: the loss of a language model's head, without the logits in memory.

For hidden h `[..., H]`, weight w `[V, H]`, bias b `[V]` and the N targets y, with scale s and soft cap c:

    z_ij   = s * (h_i . w_j + b_j)                          with a soft cap: c * tanh(z_ij / c)
    lse_i  = log(sum_j exp(z_ij))
    loss_i = lse_i - (1 - e) * z_i[y_i] - e/V * sum_j z_ij + k * lse_i^2          label smoothing e, z-loss k

`loss_i = 0` where `y_i == ignore_index`. Reductions are torch's: "none", "sum", "mean" over the rows not ignored.

The N x V logits of a large vocabulary take more memory than the rest of a model. Here rows are processed in chunks: the
logits of a chunk, its losses, immediately the gradient of its logits in their place, and its part of the gradients of
h, w and b. The backward only scales these: three matrix products as in plain torch. With "none" each row has a gradient
of its own, known only in the backward, which recomputes the logits: four products.

Memory besides inputs and gradients: `max(N * H, MIN_ROWS * V)` elements for the logits of a chunk; and, if 16-bit
gradients of w are summed over several chunks, `V * H` sums in 32 bits.

Source of the algorithm: Hsu et al., Liger Kernel (arXiv:2410.10989), and, for 16 bits without loss of precision and for
ignored rows, Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (arXiv:2411.09009). z-loss: Chowdhery
et al., PaLM (arXiv:2204.02311). `torch.nn.functional.linear_cross_entropy` (torch 2.13) with `options` is similar in
eager mode; `torch.compile` does not trace it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dsgraph.inductor_ext.ops import define_composite

from .cross_entropy_rows import LossTerms
from .launch import wide_dtype
from .linear_cross_entropy_chunks import linear_cross_entropy_grads, linear_cross_entropy_rows

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_REDUCTIONS = ("mean", "sum", "none")


def reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """Compute `linear_cross_entropy` in plain torch with all logits in memory. `options`: those of `LossTerms`."""
    terms = LossTerms(**options)
    logits = functional.linear(hidden, weight, bias).reshape(-1, weight.shape[0])
    logits = logits.to(wide_dtype(logits.dtype)) * terms.logit_scale
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    labels = target.flatten()
    valid = labels != terms.ignore_index
    losses = functional.cross_entropy(
        logits, labels, ignore_index=terms.ignore_index, label_smoothing=terms.label_smoothing, reduction="none"
    )
    losses = losses + terms.z_loss * (torch.logsumexp(logits, dim=-1) ** 2).masked_fill(~valid, 0)
    if reduction == "none":
        return losses.reshape(target.shape).to(dtype or losses.dtype)
    total = losses.sum() if reduction == "sum" else losses.sum() / valid.sum()
    return total.to(dtype or losses.dtype)


def supports(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    **_: object,
) -> str | None:
    """Return why `linear_cross_entropy` refuses these arguments; None if it does not. Fake tensors are supported."""
    if hidden.dtype not in _DTYPES:
        return f"hidden is {hidden.dtype}: cast it to one of {', '.join(map(str, _DTYPES))}"
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype is not hidden.dtype:
            return f"{name} is {tensor.dtype} and hidden {hidden.dtype}: cast one of them"
    if target.dtype is not torch.int64:
        return f"target is {target.dtype}, but classes are numbered in torch.int64"
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        return f"hidden is {_shape(hidden)} and weight {_shape(weight)}, but they must be [..., H] and [V, H]"
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != weight.shape[0]):
        return f"bias is {_shape(bias)}, but must be [V] for a weight of {_shape(weight)}"
    if target.numel() != math.prod(hidden.shape[:-1]):
        return f"target is {_shape(target)}, but must have an element for each row of hidden {_shape(hidden)}"
    if reduction not in _REDUCTIONS:
        return f"reduction is {reduction!r}, but must be one of {', '.join(map(repr, _REDUCTIONS))}"
    if not 0 <= label_smoothing <= 1:
        return f"label_smoothing is {label_smoothing}, but must be from 0 to 1"
    if softcap is not None and softcap <= 0:
        return f"softcap is {softcap}, but must be above 0, or None for no cap"
    return None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the cross-entropy of `hidden @ weight^T + bias`, like `reference`, without the logits in memory.

    Under autocast hidden, weight and bias are cast as `torch.nn.functional.linear` casts them.

    Args:
        hidden: `[..., H]`, float32, float64, bfloat16 or float16.
        weight: `[V, H]`, in the dtype of hidden.
        target: int64, with one element for each row of hidden, in any shape: from 0 to V - 1, or `ignore_index`.
        bias: `[V]`, in the dtype of hidden, or None.
        ignore_index: Rows with this target have no loss and no gradient, and are not part of a mean.
        reduction: "mean" over the rows not ignored (NaN if there are none), "sum", or "none".
        label_smoothing: From 0 to 1: the share of the target that is spread over all classes.
        z_loss: Weight of the squared logarithm of the softmax's denominator.
        softcap: Logits become `softcap * tanh(logits / softcap)`; None leaves them as they are.
        logit_scale: Logits are multiplied by it, before they are capped.
        dtype: Dtype of the result; None for that of the computation: float32, or float64 for a float64 `hidden`.

    Returns:
        The loss: `[]`, or the shape of target with reduction "none".

    Raises:
        ValueError: Shapes, dtypes or options that `supports` refuses.
        IndexError: A target is out of range; on an accelerator, an assertion of the device.
        NotImplementedError: A second derivative is needed.
    """
    hidden, weight = _autocast(hidden), _autocast(weight)
    bias = bias if bias is None else _autocast(bias)
    options = LossTerms(ignore_index, label_smoothing, z_loss, softcap, logit_scale)._asdict()
    refusal = supports(hidden, weight, target, bias, reduction=reduction, **options)
    if refusal is not None:
        raise ValueError(f"linear_cross_entropy: {refusal}")
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    loss = _reduced(rows, weight, labels, bias, reduction=reduction, **options)
    return (loss.reshape(target.shape) if reduction == "none" else loss).to(dtype or loss.dtype)


# Autograd sees what it calls, for how the loss is computed depends on whether gradients are needed.
define_composite(linear_cross_entropy)


def _reduced(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, reduction: str, **options: Any
) -> Tensor:
    tensors = (hidden, weight, target, bias)
    if reduction == "none":
        return linear_cross_entropy_rows(*tensors, **options)
    row_weights = (target != options["ignore_index"]).to(wide_dtype(hidden.dtype))
    count = row_weights.sum() if reduction == "mean" else None
    if count is not None:
        row_weights = row_weights / count.clamp(min=1)
    needs = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    if torch.is_grad_enabled() and any(needs):
        loss = linear_cross_entropy_grads(*tensors, row_weights, needs=needs, **options)[0]
    else:  # no product of vectors: autocast would round it
        loss = (linear_cross_entropy_rows(*tensors, **options) * row_weights).sum()
    return loss if count is None else loss + 0 / count  # of no rows the mean is 0 / 0, and the gradient 0


def _autocast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
