"""Losses of rows and the gradient in their place. `test_under_the_interpreter` runs this file again, by Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from dsgraph.inductor_ext.kernels.cross_entropy_rows import (
    MAX_BLOCK,
    WARPS,
    LossTerms,
    cross_entropy_rows,
    cross_entropy_rows_kernel,
)
from dsgraph.inductor_ext.kernels.launch import on_gpu

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLAIN = LossTerms(ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None, logit_scale=1.0)
OPTIONS = {
    "plain": PLAIN,
    "smoothed": PLAIN._replace(label_smoothing=0.1),
    "z_loss": PLAIN._replace(z_loss=0.05),
    "capped": PLAIN._replace(softcap=3.0),
    "scaled": PLAIN._replace(logit_scale=0.3),
    "all": LossTerms(ignore_index=2, label_smoothing=0.2, z_loss=0.01, softcap=4.0, logit_scale=-1.7),
}
# Vocabularies: odd, one class, one block of the Triton kernel, more than one.
SHAPES = [(5, 7), (1, 1), (3, 8192), (2, 8192 + 5)]


def expected(logits, target, terms):
    z = logits * terms.logit_scale
    if terms.softcap is not None:
        z = terms.softcap * torch.tanh(z / terms.softcap)
    losses = functional.cross_entropy(
        z, target, ignore_index=terms.ignore_index, label_smoothing=terms.label_smoothing, reduction="none"
    )
    z_loss = terms.z_loss * z.logsumexp(1) ** 2
    return losses + z_loss.masked_fill(target == terms.ignore_index, 0)


def inputs(rows, vocabulary, terms, dtype):
    torch.manual_seed(rows * vocabulary)
    logits = (3 * torch.randn(rows, vocabulary)).to(dtype)
    target = torch.randint(vocabulary, (rows,))
    target[rows // 2 :: 3] = terms.ignore_index
    return logits, target, torch.randn(rows, dtype=torch.float64 if dtype is torch.float64 else torch.float32)


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "loss_error", "gradient_error"),
    [
        (torch.float32, 2e-6, 2e-6),
        (torch.float64, 1e-13, 1e-13),
        (torch.bfloat16, 2e-6, 2**-7 if INTERPRETED else 2**-8),  # only the gradient is rounded, there towards 0
        (torch.float16, 2e-6, 2**-11),
    ],
    ids=str,
)
def test_loss_and_gradient(shape, name, dtype, loss_error, gradient_error):
    terms = OPTIONS[name]
    logits, target, weights = inputs(*shape, terms, dtype)
    truth = logits.double().clone().requires_grad_()
    losses = expected(truth, target, terms)
    (gradient,) = torch.autograd.grad(losses @ weights.double(), truth)
    got = cross_entropy_rows(logits, target, weights, terms)
    assert got.dtype is weights.dtype
    scale = losses.abs().max().clamp(min=1)
    torch.testing.assert_close(got.double(), losses, rtol=0, atol=loss_error * scale.item())
    torch.testing.assert_close(logits.double(), gradient, rtol=gradient_error, atol=gradient_error / 10)
    ignored = target == terms.ignore_index
    assert not got[ignored].any() and not logits[ignored].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_without_weights_the_losses_are_the_same(name):
    terms = OPTIONS[name]
    logits, target, weights = inputs(4, 300, terms, torch.float32)
    alone = cross_entropy_rows(logits.clone(), target, None, terms)
    assert torch.equal(alone, cross_entropy_rows(logits, target, weights, terms))


def test_classes_may_be_ruled_out():
    logits, target, weights = inputs(3, 8192 + 20, PLAIN, torch.float32)
    logits[:, :8192] = float("-inf")  # the whole first block
    target.fill_(8200)
    truth = logits.clone().requires_grad_()
    losses = expected(truth, target, PLAIN)
    (gradient,) = torch.autograd.grad(losses @ weights, truth)
    torch.testing.assert_close(cross_entropy_rows(logits, target, weights, PLAIN), losses.detach())
    torch.testing.assert_close(logits, gradient)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    losses = cross_entropy_rows(logits, torch.tensor([1]), torch.ones(1), PLAIN)
    assert losses.tolist() == [2e4]
    assert logits.tolist() == [[1.0, -1.0, 0.0]]


def test_targets_and_weights_need_not_be_contiguous():
    logits, target, weights = inputs(6, 11, PLAIN, torch.float32)
    apart = cross_entropy_rows(
        logits.clone(), target.repeat_interleave(2)[::2], weights.repeat_interleave(2)[::2], PLAIN
    )
    assert torch.equal(apart, cross_entropy_rows(logits, target, weights, PLAIN))


def test_which_of_the_two_runs():
    assert on_gpu(torch.empty(0)) is INTERPRETED


@pytest.mark.inductor
@pytest.mark.skipif(INTERPRETED, reason="this is it")
def test_under_the_interpreter(request):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    if "not full" in request.config.option.markexpr:
        command += ["-m", "not full"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.inductor
@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.covering(1)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_compiles_without_a_gpu(capability, dtype):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        "logits": f"*{dtype}",
        "target": "*i64",
        "row_weights": "*fp32",
        "losses": "*fp32",
        **dict.fromkeys(("vocabulary", "stride", "ignore_index"), "i32"),
        **dict.fromkeys(("label_smoothing", "z_loss", "softcap", "logit_scale"), "fp32"),
        **dict.fromkeys(("HAS_SOFTCAP", "WRITES_GRADIENT", "BLOCK"), "constexpr"),
    }
    constants = {"HAS_SOFTCAP": True, "WRITES_GRADIENT": True, "BLOCK": MAX_BLOCK}
    source = ASTSource(cross_entropy_rows_kernel, signature, constants)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": WARPS})
    assert compiled.asm["cubin"]
    assert ".local" not in compiled.asm["ptx"]  # nothing is spilled by the front end
