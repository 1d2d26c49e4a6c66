"""Block-sparse attention: only some blocks of scores are computed, forward and backward; the others cost nothing.

For q `[b, heads, l, d]`, k `[b, heads of keys, l, d]` and v `[b, heads of keys, l, e]`:

    scores = scale * (q @ k^T) + bias       where layout, mask and causality let a key be visible; else nothing
    y      = dropout(softmax(scores)) @ v   [b, heads, l, e]

A query without visible keys gets 0. `reference` computes it with all scores. On a CPU `block_attention.py` computes it,
on a GPU FlexAttention if it can (`flex.py`), otherwise `block_attention.py` as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as users write it
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsgraph.inductor_ext.compat import never_merge, transforms_in_kernel
from dsgraph.inductor_ext.ops import define_op

from . import block_attention, flex
from .reading import codes_of, read_layout


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    layout: str,
    *,
    scale: float,
    dropout_p: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in plain torch, with all scores; logarithms of sums and seed are left at 0."""
    length, heads = q.shape[2], q.shape[1]
    kept = codes_of(layout, heads, length, causal=causal).tokens(length).to(q.device)
    kept = kept if mask is None else kept & mask
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (item.repeat_interleave(heads // k.shape[1], dim=1) for item in (k, v))
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    if bias is not None:
        scores = scores + bias
    probabilities = scores.masked_fill(~kept, torch.finfo(wide).min).softmax(-1).masked_fill(~kept, 0)
    y = (F.dropout(probabilities, dropout_p, training=dropout_p > 0) @ v.to(wide)).to(q.dtype)
    sums, seed = _rest(q, layout, dropout_p, y.new_zeros)
    return y, sums, seed


def _rest(q: Tensor, layout: str, dropout_p: float, empty: Any) -> tuple[Tensor, Tensor]:
    block = read_layout(layout).block
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    sums = empty((q.shape[0], q.shape[1], (q.shape[2] + block - 1) // block * block), dtype=wide)
    return sums, empty((1 if dropout_p > 0 else 0,), dtype=torch.int64, device="cpu")


def _fake(q: Tensor, k: Tensor, v: Tensor, *args: Any, dropout_p: float, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    never_merge(torch.ops.dsgraph.block_sparse_attention)  # no graph has a call of it before this has run
    y = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    return (y, *_rest(q, args[2], dropout_p, q.new_empty))


@define_op(like=reference, fake=_fake, tags=(torch.Tag.nondeterministic_seeded,))
def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, layout: str, **options: Any
) -> Any:
    """Compute attention in blocks, with the arguments of `reference`.

    Args:
        q: `[b, heads, l, d]`, of any floating dtype.
        k: `[b, heads of keys, l, d]`; the heads divide those of q.
        v: `[b, heads of keys, l, e]`.
        mask: bool, four dimensions, broadcast over `[b, heads, l, l]`: True for visible keys. None: all are.
        bias: Added to the scores, four dimensions, broadcast like the mask; differentiable. None: no bias.
        layout: `Layout.text`.
        **options: The factor of the scores, the dropped share of probabilities, and `causal`: True if queries see no
            later keys, whatever the layout says.

    Returns:
        The result `[b, heads, l, e]` in the dtype of q; for the backward, logarithms of sums of exponentials, and the
            seed of the dropout.
    """
    attention = _attention(mask, bias, layout, options)
    sums, seed = _rest(q, layout, attention.dropout_p, q.new_empty)
    if flex.why_not(q, v, attention) is None:
        with transforms_in_kernel(), torch.no_grad():
            y = flex.flex(q, k, v, attention)
        return y.transpose(1, 2).contiguous().transpose(1, 2), sums.zero_(), seed
    if attention.dropout_p > 0:
        seed = torch.randint(2**62, (1,))
    y, sums = block_attention.forward(q, k, v, _seeded(attention, seed))
    return y, sums, seed


@define_op(
    fake=lambda grad, q, k, v, y, sums, seed, mask, bias, *_, bias_needs_grad, **__: (
        *(item.new_empty(item.shape) for item in (q, k, v)),
        bias.new_empty(bias.shape) if bias_needs_grad else q.new_empty(0),
    )
)
def block_sparse_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    seed: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    layout: str,
    *,
    scale: float,
    dropout_p: float,
    causal: bool,
    bias_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and, if needed, of the bias, contiguous; else an empty tensor in its place."""
    options = {"scale": scale, "dropout_p": dropout_p, "causal": causal}
    attention = _attention(mask, bias, layout, options)
    if flex.why_not(q, v, attention) is None:
        with transforms_in_kernel(), torch.enable_grad():
            inputs = [item.detach().requires_grad_() for item in (q, k, v)]
            found = torch.autograd.grad(flex.flex(inputs[0], inputs[1], inputs[2], attention), inputs, grad)
        dq, dk, dv = (item.contiguous() for item in found)
        return dq, dk, dv, q.new_empty(0)
    attention = replace(_seeded(attention, seed), bias_needs_grad=bias_needs_grad)
    dq, dk, dv, dbias = block_attention.backward(grad, q, k, v, y, sums, attention)
    return dq, dk, dv, q.new_empty(0) if dbias is None else dbias


def _attention(
    mask: Tensor | None, bias: Tensor | None, layout: str, options: dict[str, Any]
) -> block_attention.BlockAttention:
    return block_attention.BlockAttention(text=layout, mask=mask, bias=bias, **options)


def _seeded(attention: block_attention.BlockAttention, seed: Tensor) -> block_attention.BlockAttention:
    return replace(attention, seed=int(seed)) if attention.dropout_p > 0 else attention


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    q, k, v, mask, bias, ctx.layout = inputs
    ctx.save_for_backward(q, k, v, mask, bias, *output)
    ctx.options = keyword_only_inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    q, k, v, mask, bias, y, sums, seed = ctx.saved_tensors
    needs = bias is not None and ctx.needs_input_grad[4]
    *found, dbias = torch.ops.dsgraph.block_sparse_attention_backward(
        *(grad, q, k, v, y, sums, seed, mask, bias, ctx.layout), **ctx.options, bias_needs_grad=needs
    )
    return (*found, None, dbias if needs else None, None)


block_sparse_attention.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.dsgraph.block_sparse_attention)
def _flops(q: Any, k: Any, v: Any, mask: Any, bias: Any, layout: str, *args: Any, causal: bool, **_: Any) -> int:
    """Return the operations of the products over the computed blocks."""
    return q[0] * read_layout(layout).flops(q[1], q[2], (q[3] + v[3]) // 2, causal=causal)


@register_flop_formula(torch.ops.dsgraph.block_sparse_attention_backward)
def _backward_flops(grad: Any, q: Any, k: Any, v: Any, *rest: Any, causal: bool, **options: Any) -> int:
    layout = rest[5]
    return 5 * _flops(q, k, v, None, None, layout, causal=causal) // 2


def supports(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> str | None:
    """Return why the op does not support these arguments, or None."""
    if not q.ndim == k.ndim == v.ndim == 4:  # sizes that change are taken for equal where they are one symbol
        return f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions, not 4: batch, heads, tokens, width"
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, not of one floating dtype"
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        return f"q, k and v are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}, which do not fit each other"
    if q.shape[2] != k.shape[2]:
        return f"it has {q.shape[2]} queries and {k.shape[2]} keys, and a layout as many of both"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads of queries cannot share {k.shape[1]} heads of keys"
    whole = (q.shape[0], q.shape[1], q.shape[2], q.shape[2])
    for name, item in (("mask", mask), ("bias", bias)):
        if item is None:
            continue
        if item.ndim != 4 or any(size not in (1, full) for size, full in zip(item.shape, whole, strict=True)):
            return f"its {name} is {list(item.shape)}, which is not broadcast over {list(whole)}"
    if mask is not None and mask.dtype != torch.bool:
        return f"its mask is {mask.dtype}, not bool"
    if bias is not None and not bias.dtype.is_floating_point:
        return f"its bias is {bias.dtype}, not of a floating dtype"
    return None
