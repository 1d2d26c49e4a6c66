"""The loss of a head by chunks of rows: the loops of `linear_cross_entropy`, and the size of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .cross_entropy_rows import LossTerms, cross_entropy_rows
from .launch import wide_dtype

# Fewest rows of a chunk: below, each pass over w and over the gradient of w takes longer than their products.
MIN_ROWS = 256
MIN_ROWS_ACCELERATOR = 1024


def least_rows(device_type: str) -> int:
    """Return the least rows of a chunk, if there are as many."""
    return MIN_ROWS if device_type == "cpu" else MIN_ROWS_ACCELERATOR


def rows_per_chunk(rows: int, vocabulary: int, hidden_size: int, *, least: int) -> int:
    """Return the rows of a chunk: its logits have at most as many elements as hidden, but at least `least` rows."""
    most = max(least, rows * hidden_size // vocabulary, 1)
    chunks = -(-rows // most)
    return -(-rows // max(chunks, 1))


def row_chunks(target: Tensor, weight: Tensor, ignore_index: int) -> list[slice] | list[Tensor]:
    """Return the rows of each chunk.

    On a CPU ignored rows are left out: the padding of batches, the prompts of instructions. On an accelerator their
    number is not known without waiting for it.

    Raises:
        IndexError: A target is out of range. On an accelerator it is an assertion of the device, as in torch.
    """
    vocabulary, hidden_size = weight.shape
    valid = target != ignore_index
    kept: Tensor | None = None
    least = least_rows(target.device.type)
    if target.device.type == "cpu":
        wrong = target[valid & ((target < 0) | (target >= vocabulary))]
        if len(wrong):
            raise IndexError(
                f"linear_cross_entropy: target {int(wrong[0])} is out of range: weight has {vocabulary} rows, and "
                f"ignore_index is {ignore_index}"
            )
        kept = None if bool(valid.all()) else valid.nonzero().squeeze(1)
    else:
        # Its result is unused: it is here for its assertion, which does not wait for the device.
        target.new_zeros(vocabulary).index_select(0, target.masked_fill(~valid, 0))
    count = len(target) if kept is None else len(kept)
    step = rows_per_chunk(count, vocabulary, hidden_size, least=least)
    if kept is not None:
        return list(kept.split(step)) if count else []
    return [slice(start, min(start + step, count)) for start in range(0, count, max(step, 1))]


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Return the logits of the rows of `hidden`, in `out` if that is given."""
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def _logits_buffer(hidden: Tensor, weight: Tensor, chunks: Sequence[slice] | Sequence[Tensor]) -> Tensor:
    """Return one buffer for all chunks, of which the first is largest: new memory for each would cost page faults."""
    first = chunks[0] if chunks else slice(0, 0)
    rows = first.stop - first.start if isinstance(first, slice) else len(first)
    return hidden.new_empty((rows, len(weight)))


def _add_product(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Add `d_logits^T @ hidden` to `total`, which may be wider than the other two."""
    if total.dtype is d_logits.dtype:
        total.addmm_(d_logits.t(), hidden)
    elif d_logits.is_cuda:
        torch.addmm(total, d_logits.t(), hidden, out_dtype=total.dtype, out=total)
    elif d_logits.dtype is torch.float16:  # whose range a sum over many rows may exceed
        total.addmm_(d_logits.t().to(total.dtype), hidden.to(total.dtype))
    else:
        total.add_(torch.mm(d_logits.t(), hidden))


def _norm(row_weights: Tensor) -> Tensor:
    """Return the largest weight of a row, above 0: divided by it, weights are well inside float16's range."""
    if len(row_weights) == 0:
        return row_weights.new_ones(())
    return row_weights.abs().nan_to_num(nan=0.0, posinf=0.0).amax().clamp(min=torch.finfo(row_weights.dtype).tiny)


def _zero_gradients(
    hidden: Tensor, weight: Tensor, needs: Sequence[bool], *, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return zeros of the shapes of hidden, weight and bias, where needed; sums over chunks in 32 bits if `wide`."""
    stored = _stored_dtype(hidden.dtype)
    summed = wide_dtype(hidden.dtype) if wide else stored
    return (
        hidden.new_zeros(hidden.shape if needs[0] else 0, dtype=stored),
        hidden.new_zeros(weight.shape if needs[1] else 0, dtype=summed),
        hidden.new_zeros(weight.shape[0] if needs[2] else 0, dtype=wide_dtype(hidden.dtype)),
    )


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype is torch.float16 else dtype


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale"


@torch.library.custom_op(
    "dsgraph::linear_cross_entropy_rows",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, *, {_OPTIONS}) -> Tensor",
)
def linear_cross_entropy_rows(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any
) -> Tensor:
    """Return the loss of each row.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`, in the dtype of hidden.
        target: `[N]`, int64.
        bias: `[V]`, in the dtype of hidden, or None.
        options: The fields of `LossTerms`.

    Returns:
        `[N]`, in 32 bits (64 for a 64-bit `hidden`).
    """
    terms = LossTerms(**options)
    losses = hidden.new_zeros(len(hidden), dtype=wide_dtype(hidden.dtype))
    chunks = row_chunks(target, weight, terms.ignore_index)
    buffer = _logits_buffer(hidden, weight, chunks)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks:
            part = hidden[rows]
            logits = logits_of(part, weight, bias, buffer[: len(part)])
            losses[rows] = cross_entropy_rows(logits, target[rows], None, terms)
    return losses


linear_cross_entropy_rows.register_fake(
    lambda hidden, *tensors, **options: hidden.new_empty(hidden.shape[0], dtype=wide_dtype(hidden.dtype))
)


@torch.library.custom_op(
    "dsgraph::linear_cross_entropy_grads",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor row_weights, *, bool[] needs, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def linear_cross_entropy_grads(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    row_weights: Tensor,
    *,
    needs: Sequence[bool],
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a weighted sum of the losses of all rows, and its gradients.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`, in the dtype of hidden.
        target: `[N]`, int64.
        bias: `[V]`, in the dtype of hidden, or None.
        row_weights: `[N]`, in 32 bits (64 for a 64-bit `hidden`).
        needs: True for each needed gradient: hidden, weight, bias.
        options: The fields of `LossTerms`.

    Returns:
        The sum, `[]` in the dtype of row_weights; the gradients of hidden, weight and bias, empty where not needed:
        in their dtypes, those of float16 in float32, in which the gradient of a mean is not too small.
    """
    terms = LossTerms(**options)
    total = row_weights.new_zeros(())
    chunks = row_chunks(target, weight, terms.ignore_index)
    buffer = _logits_buffer(hidden, weight, chunks)
    norm = _norm(row_weights) if hidden.dtype is torch.float16 else None
    row_weights = row_weights if norm is None else row_weights / norm
    d_hidden, d_weight, d_bias = _zero_gradients(hidden, weight, needs, wide=len(chunks) > 1)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks:
            part, weights = hidden[rows], row_weights[rows]
            logits = logits_of(part, weight, bias, buffer[: len(part)])
            total += cross_entropy_rows(logits, target[rows], weights, terms) @ weights
            if needs[0]:
                d_hidden[rows] = torch.mm(logits, weight).to(d_hidden.dtype)
            if needs[1]:
                _add_product(d_weight, logits, part)
            if needs[2]:
                d_bias += logits.sum(0, dtype=d_bias.dtype)
    if norm is not None:
        for result in (total, d_hidden, d_weight, d_bias):
            result *= norm
    stored = _stored_dtype(hidden.dtype)
    return total, d_hidden, d_weight.to(stored), d_bias.to(stored)


@linear_cross_entropy_grads.register_fake
def _grads_fake(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, row_weights: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs, stored = options["needs"], _stored_dtype(hidden.dtype)
    return (
        row_weights.new_empty(()),
        hidden.new_empty(hidden.shape if needs[0] else 0, dtype=stored),
        hidden.new_empty(weight.shape if needs[1] else 0, dtype=stored),
        hidden.new_empty(weight.shape[0] if needs[2] else 0, dtype=stored),
    )


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = [ctx.needs_input_grad[number] for number in (0, 1, 3)]
    hidden = ctx.saved_tensors[0]
    found = linear_cross_entropy_grads(*ctx.saved_tensors, grad, needs=needs, **ctx.options)
    d_hidden, d_weight, d_bias = (
        gradient.to(hidden.dtype) if needed else None for gradient, needed in zip(found[1:], needs, strict=True)
    )
    return d_hidden, d_weight, None, d_bias


linear_cross_entropy_rows.register_autograd(_rows_backward, setup_context=_setup_rows)


def _setup_grads(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]
) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.needs = keyword_only_inputs["needs"]
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)


def _grads_backward(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(gradient is not None for gradient in of_gradients):
        raise NotImplementedError(
            "linear_cross_entropy has no second derivatives: compute the loss with torch.nn.functional.linear and "
            "cross_entropy where you need them"
        )
    if grad is None:
        return (None,) * 5
    d_hidden, d_weight, d_bias = (
        # In 32 bits: a factor in 16 would be wrong by up to 1/512, the same way in all elements.
        (gradient.to(grad.dtype) * grad).to(ctx.dtype) if needed else None
        for gradient, needed in zip(ctx.saved_tensors, ctx.needs, strict=True)
    )
    return d_hidden, d_weight, None, d_bias, None


linear_cross_entropy_grads.register_autograd(_grads_backward, setup_context=_setup_grads)


@register_flop_formula(torch.ops.dsgraph.linear_cross_entropy_rows)
def _rows_flops(hidden: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * hidden[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.dsgraph.linear_cross_entropy_grads)
def _grads_flops(hidden: Sequence[int], weight: Sequence[int], *_: Any, needs: Sequence[bool], **__: Any) -> int:
    return 2 * hidden[0] * weight[0] * weight[1] * (1 + sum(needs[:2]))
