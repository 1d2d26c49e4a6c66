"""Block-sparse attention: FlexAttention's kernels on CUDA, against all scores in float64."""

from __future__ import annotations

import time

import pytest
import torch

import dsgraph
from dsgraph import sparse
from dsgraph.inductor_ext.sparse import block_sparse_attention
from tests.gpu.device import error_of, host_waits, synchronize

pytestmark = [pytest.mark.gpu, pytest.mark.inductor]

SHARE = {torch.float32: 5e-3, torch.bfloat16: 1.6e-2, torch.float16: 4e-3}
"""The largest error; FlexAttention multiplies float32 as TF32."""

assert dsgraph.partition  # registers the ops


@pytest.mark.parametrize("dtype", SHARE, ids=str)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_forward_and_backward(block, dtype, device, record):
    layout = sparse.Fixed(block=block).text
    options = {"scale": 0.125, "dropout_p": 0.0, "causal": True}
    inputs = [torch.randn(2, 4, 512, 64, device=device).to(dtype).requires_grad_() for _ in range(3)]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    op = torch.ops.dsgraph.block_sparse_attention
    y = op(*inputs, None, None, layout, **options)[0]
    grad = torch.randn_like(y)
    got = [y, *torch.autograd.grad(y, inputs, grad)]
    truth = block_sparse_attention.reference(*wide, None, None, layout, **options)[0]
    truth = [truth, *torch.autograd.grad(truth, wide, grad.double())]
    found = [error_of(a, b) for a, b in zip(got, truth, strict=True)]
    record(errors=found)
    assert max(found) < SHARE[dtype], found
    record(host_waits=host_waits(lambda: op(*inputs, None, None, layout, **options)))
    started = time.perf_counter()
    op(*inputs, None, None, layout, **options)
    returned = time.perf_counter() - started
    synchronize()
    record(host_ms=1e3 * returned, ms=1e3 * (time.perf_counter() - started))


def test_dropout_and_bias_are_computed_in_blocks(device):
    layout = sparse.Fixed(block=16).text
    q, k, v = (torch.randn(2, 4, 128, 32, device=device, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 4, 128, 128, device=device, requires_grad=True)
    op = torch.ops.dsgraph.block_sparse_attention
    options = {"scale": 0.2, "dropout_p": 0.0, "causal": False}
    got = op(q, k, v, None, bias, layout, **options)[0]
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, bias)]
    truth = block_sparse_attention.reference(*wide[:3], None, wide[3], layout, **options)[0]
    pairs = [(got, truth)]
    pairs += zip(torch.autograd.grad(got.sum(), (q, k, v, bias)), torch.autograd.grad(truth.sum(), wide), strict=True)
    assert max(error_of(a, b) for a, b in pairs) < 1e-4
    options["dropout_p"] = 0.5
    y = op(q, k, v, None, None, layout, **options)[0]
    assert y.isfinite().all() and not torch.equal(y, op(q, k, v, None, None, layout, **options)[0])
