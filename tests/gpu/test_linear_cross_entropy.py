from __future__ import annotations

import pytest
import torch

from dsgraph.inductor_ext import linear_cross_entropy
from dsgraph.inductor_ext.kernels.linear_cross_entropy import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HOW = {"label_smoothing": 0.1, "z_loss": 0.001, "softcap": 10.0, "logit_scale": 0.7}


def inputs(dtype, rows=3000, vocabulary=10_007, size=256):
    """Three chunks, two blocks of the kernel, nothing a power of two."""
    torch.manual_seed(0)
    target = torch.randint(vocabulary, (rows,), device="cuda")
    target[::5] = -100
    shapes = ((rows, size), (vocabulary, size), (vocabulary,))
    hidden, weight, bias = (torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes)
    return hidden, weight, target, bias


def results(loss, tensors, **how):
    value = loss(*tensors, **how)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return [value, *torch.autograd.grad(value, wanted, torch.ones_like(value))]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("how", [{}, HOW], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_matches_plain_torch(dtype, how, reduction):
    tensors = inputs(dtype)
    for got, expected in zip(
        results(linear_cross_entropy, tensors, reduction=reduction, **how),
        results(reference, tensors, reduction=reduction, **how),
        strict=True,
    ):
        error = (got - expected).abs().max() / expected.abs().max()
        assert error < (1e-10 if dtype is torch.float64 else 1e-5)


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
@pytest.mark.parametrize("how", [{}, HOW], ids=str)
def test_sixteen_bits_are_as_exact_as_plain_torch(dtype, ulp, how):
    low = inputs(dtype)
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in low]
    found = (results(loss, tensors, **how) for loss, tensors in ((linear_cross_entropy, low), (reference, low)))
    for got, usual, truth in zip(*found, results(reference, exact, **how), strict=True):
        assert (got - truth).norm() <= (usual - truth).norm() + ulp * truth.norm()


@pytest.mark.inductor
def test_compiled_without_waiting_for_the_device():
    tensors = inputs(torch.bfloat16)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    results(compiled, tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = results(compiled, tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(got, results(linear_cross_entropy, tensors), strict=True):
        torch.testing.assert_close(one, other)


def test_peak_memory():
    torch.manual_seed(0)
    hidden = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(64_000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(64_000, (8192,), device="cuda")

    def peak(loss):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(hidden, weight, target).backward()
        hidden.grad = weight.grad = None
        return torch.cuda.max_memory_allocated() - before

    assert peak(linear_cross_entropy) < 0.15 * peak(reference)
