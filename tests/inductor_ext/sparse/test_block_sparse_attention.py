"""The op against dense attention with the same mask: values, gradients, and that it does less."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dsgraph
from dsgraph.inductor_ext.sparse import block_attention, flex, row_buckets
from dsgraph.inductor_ext.sparse.block_sparse_attention import reference
from dsgraph.sparse import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    SparseLayoutError,
    Variable,
    from_block_mask,
    from_mask_mod,
)

HEADS, WIDTH = 4, 8
LAYOUTS = {
    "dense": Dense(block=8),
    "fixed": Fixed(block=4),
    "fixed-one-way": Fixed(block=4, attention="unidirectional"),
    "fixed-horizontal": Fixed(block=4, horizontal_global_attention=True),
    "fixed-by-head": Fixed(block=4, different_layout_per_head=True, num_different_global_patterns=4),
    "variable": Variable(block=4, num_random_blocks=2, local_window_blocks=(1, 2), different_layout_per_head=True),
    "bigbird": BigBird(block=4),
    "bigbird-one-way": BigBird(block=4, attention="unidirectional"),
    "bslongformer": BSLongformer(block=4, global_block_indices=(0, 5), global_block_end_indices=(2, 6)),
    "local": LocalSlidingWindow(block=4),
}


def _inputs(length, dtype=torch.float32, *, kv_heads=HEADS, batch=2):
    torch.manual_seed(0)
    q = torch.randn(batch, length, HEADS, WIDTH).to(dtype).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(batch, kv_heads, length, WIDTH).to(dtype).requires_grad_() for _ in range(2))
    return q, k, v


def _both(q, k, v, layout, *, mask=None, bias=None, causal=False, scale=0.3):
    """Results and gradients, of the op and of the reference in float32."""
    wanted = [q, k, v] + ([bias] if bias is not None and bias.requires_grad else [])
    grad = torch.randn(q.shape)
    y = dsgraph.ops.block_sparse_attention(q, k, v, layout, mask=mask, bias=bias, causal=causal, scale=scale)
    own = [y, *torch.autograd.grad(y, wanted, grad.to(y.dtype))]
    wide = [item.detach().float().requires_grad_() for item in (q, k, v)]
    bias = None if bias is None else bias.detach().float().requires_grad_()
    mask = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
    y, *_ = reference(*wide, mask, bias, layout.text, scale=scale, dropout_p=0.0, causal=causal)
    inputs = [*wide, bias] if len(wanted) > 3 else wide
    return own, [y, *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize("length", [64, 61])
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients_are_those_of_dense_attention(name, length):
    for one, other in zip(*_both(*_inputs(length), LAYOUTS[name]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fixed", "fixed-by-head", "bigbird", "local"])
def test_masks_biases_and_shared_heads(name):
    length = 45
    padding = torch.arange(length) < torch.tensor([[45], [20]])
    bias = torch.randn(1, HEADS, length, length, requires_grad=True)
    whole = torch.rand(2, HEADS, length, length) > 0.5
    cases = [
        {"mask": padding, "causal": True},
        {"mask": whole, "bias": bias},
        {"bias": bias.detach()},
        {"bias": torch.randn(1, 1, 1, length, requires_grad=True), "mask": padding},
    ]
    for case in cases:
        for one, other in zip(*_both(*_inputs(length, kv_heads=2), LAYOUTS[name], **case), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_as_dense_attention(dtype):
    layout = LAYOUTS["fixed"]
    q, k, v = _inputs(96, dtype)
    own, exact = _both(q, k, v, layout)
    kept = layout.codes(HEADS, 96).tokens(96)
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept[None], scale=0.3)
    torch.manual_seed(0)
    _inputs(96)
    grad = torch.randn(q.shape).to(dtype)
    dense = [y, *torch.autograd.grad(y, (q, k, v), grad)]
    for one, plain, truth in zip(own, dense, exact, strict=True):
        assert one.dtype == dtype
        assert (one - truth).abs().mean() <= 1.05 * (plain - truth).abs().mean()


def test_gradients_are_slopes():
    q, k, v = _inputs(11, torch.float64, batch=1)
    bias = torch.randn(1, 1, 11, 11, dtype=torch.float64, requires_grad=True)

    def attend(*given):
        return dsgraph.ops.block_sparse_attention(*given[:3], LAYOUTS["bigbird"], bias=given[3])

    torch.autograd.gradcheck(attend, (q, k, v, bias), fast_mode=True)


def test_the_backward_drops_what_the_forward_dropped():
    q, k, v = _inputs(32)
    ones = torch.ones_like(v).requires_grad_()
    y = dsgraph.ops.block_sparse_attention(q, k, ones, LAYOUTS["fixed"], dropout=0.5)
    assert 0.9 < y.mean() < 1.1
    assert (y - 1).abs().max() > 0.1
    grad = torch.randn_like(y)
    (slope,) = torch.autograd.grad(y, ones, grad)  # y is linear in v
    torch.testing.assert_close((slope * ones).sum(), (y * grad).sum())


def test_a_checkpoint_draws_the_same_again():
    q, k, v = _inputs(32)

    def attend(q):
        return dsgraph.ops.block_sparse_attention(q, k, v, LAYOUTS["fixed"], dropout=0.5)

    torch.manual_seed(1)
    (plain,) = torch.autograd.grad(attend(q).sum(), q)
    torch.manual_seed(1)
    (again,) = torch.autograd.grad(checkpoint(attend, q, use_reentrant=False).sum(), q)
    assert torch.equal(plain, again)


def test_a_query_without_keys_gives_nothing():
    q, k, v = _inputs(16)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1] = False
    y = dsgraph.ops.block_sparse_attention(q, k, v, LAYOUTS["fixed"], mask=mask)
    assert not y[1].any()
    assert all(not grad[1].any() for grad in torch.autograd.grad(y.sum(), (q, k, v)))
    rows = torch.ones(4, 4, dtype=torch.bool)
    rows[2] = False
    y = dsgraph.ops.block_sparse_attention(q, k, v, from_block_mask(rows, block=4))
    assert not y[:, :, 8:12].any()
    assert y[:, :, :8].all()


def test_a_mask_function_is_what_flex_attention_computes():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(b, h, q, k):
        return (q - k).abs() < 5

    q, k, v = (item.detach() for item in _inputs(64))
    layout = from_mask_mod(near, length=64, block=16)
    plain = flex_attention(
        q, k, v, block_mask=create_block_mask(near, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16), scale=0.3
    )
    y = dsgraph.ops.block_sparse_attention(q, k, v, layout, scale=0.3)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fixed-by-head", "bigbird-one-way", "bslongformer"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_block_mask_for_a_gpu_means_the_same(name, masked):
    q, k, v = (item.detach() for item in _inputs(61, kv_heads=2))
    mask = torch.rand(2, 1, 1, 61) > 0.2 if masked else None
    attention = block_attention.BlockAttention(LAYOUTS[name].text, mask, None, scale=0.3, dropout_p=0.0, causal=False)
    y = dsgraph.ops.block_sparse_attention(q, k, v, LAYOUTS[name], mask=mask, scale=0.3)
    torch.testing.assert_close(flex.flex(q, k, v, attention, compiled=False), y, rtol=1e-5, atol=1e-5)


def test_skipped_blocks_are_no_work():
    layout = Fixed(block=4, num_local_blocks=2, num_global_blocks=0)
    (buckets,) = row_buckets.buckets_of(layout.text, 1, 64, causal=False, most_scores=None)
    scores = sum(item.rows.numel() * item.columns.shape[1] * 16 for item in buckets)
    assert scores == 64 * 8
    assert len(buckets) == 1  # all windows are one batched product


def test_the_op_keeps_torchs_rules():
    q, k, v = _inputs(12)
    mask = torch.rand(2, 1, 1, 12) > 0.3
    bias = torch.randn(1, HEADS, 12, 12, requires_grad=True)
    torch.library.opcheck(
        torch.ops.dsgraph.block_sparse_attention.default,
        (q, k, v, mask, bias, LAYOUTS["fixed"].text),
        {"scale": 0.3, "dropout_p": 0.0, "causal": True},
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": torch.zeros(2, 3, 16, WIDTH), "v": torch.zeros(2, 3, 16, WIDTH)}, "4 heads of queries cannot share 3"),
        ({"k": torch.zeros(2, 4, 9, WIDTH), "v": torch.zeros(2, 4, 9, WIDTH)}, "16 queries and 9 keys"),
        ({"mask": torch.ones(2, 9, dtype=torch.bool)}, "which is not broadcast"),
        ({"mask": torch.ones(2, 16)}, "its mask is torch.float32, not bool"),
        ({"layout": "fixed"}, "layout is 'fixed'; it takes one of dsgraph.sparse"),
        ({"dropout": 2.0}, "a share from 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(change, said):
    given = dict(zip("qkv", _inputs(16), strict=True), layout=LAYOUTS["fixed"]) | change
    with pytest.raises(SparseLayoutError, match=said):
        dsgraph.ops.block_sparse_attention(**given)


def test_the_module_is_the_function():
    q, k, v = _inputs(32)
    module = dsgraph.nn.SparseSelfAttention(LAYOUTS["bigbird"], dropout=0.5, causal=True).eval()
    plain = dsgraph.ops.block_sparse_attention(q, k, v, LAYOUTS["bigbird"], causal=True)
    assert torch.equal(module(q, k, v), plain)
    assert not torch.equal(module.train()(q, k, v), plain)
