from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.passes.kernels.patterns.bias_gelu import SPEC
from dsgraph.passes.kernels.registry import KERNELS
from tests.inductor_ext.kernels.checks import assert_as_near, gradients
from tests.passes.kernels.patterns.test_geglu import new_gelu
from tests.passes.kernels.test_substitute_kernels import substitute


def _erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


SPELLINGS = {
    "F.gelu": lambda x, b: F.gelu(x + b),
    "tanh": lambda x, b: F.gelu(torch.add(b, x), approximate="tanh"),
    "written out": lambda x, b: new_gelu(b + x),
    "erf": lambda x, b: _erf(x.add(b)),
    "in float32": lambda x, b: F.gelu(x.float() + b.float()).type_as(x),
}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(size).to(dtype).requires_grad_() for size in ((2, 3, 16), (16,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_found_and_means_the_same(spelling, dtype):
    inputs, plain_of = _inputs(dtype), SPELLINGS[spelling]
    gm, record, result = substitute(plain_of, *inputs, kernels=[SPEC])
    assert record.changed == 1 and record.notes == ()
    assert not any(name in gm.code for name in ("gelu(", "erf(", "tanh(", "pow", "add"))
    plain = plain_of(*inputs)
    ours, theirs = [result, *gradients(result, inputs)], [plain, *gradients(plain, inputs)]
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)
    else:
        wide = tuple(item.detach().float().requires_grad_() for item in inputs)
        truth = plain_of(*wide)
        assert_as_near(ours, theirs, [truth, *gradients(truth, wide)])


def test_a_gate_with_a_bias_is_a_gate():
    def function(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x + b) * x

    gm, record, _ = substitute(function, *_inputs(torch.float32), kernels=KERNELS)
    assert record.changed == 1 and "dsgraph.geglu" in gm.code


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, b: F.gelu(x[..., :1] + b), "its bias has 16 elements and its input 1 columns"),
        (lambda x, b: F.gelu(x + b[:1]), "its bias has 1 elements and its input 16 columns"),
        (lambda x, b: (z := x + b) + F.gelu(z), "which it computes on the way, is read by"),
        (lambda x, b: 0.5 * (z := x + b) * (1 + torch.erf(z / 1.4)), "its erf is of 0.7142857 x^1"),
    ],
)
def test_near_misses_are_left_alone_and_named(function, reason):
    inputs = _inputs(torch.float32)
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and reason in record.notes[0]
    assert torch.equal(result, function(*inputs))


def _written_to_in_between(x: Tensor, b: Tensor) -> Tensor:
    z = (x := x.clone()) + b
    x.mul_(2)
    return F.gelu(z)


def test_an_input_that_is_written_to_before_it_is_through():
    inputs = _inputs(torch.float32)
    _, record, result = substitute(_written_to_in_between, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "writes to what it reads before it is through" in record.notes[0]
    assert torch.equal(result, _written_to_in_between(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, b: F.gelu(F.linear(x, b.expand(16, 16), b)),
        lambda x, b: F.gelu(x + x),
        lambda x, b: F.gelu(x + 1) + b,
        lambda x, b: F.gelu(torch.add(x, b, alpha=2)),
        lambda x, b: F.gelu(x.clone().add_(b)),
        lambda x, b: F.silu(x + b),
    ],
)
def test_other_uses_of_its_ops_are_none_of_its_business(function):
    inputs = _inputs(torch.float32)
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.notes == ()
    assert torch.equal(result, function(*inputs))
