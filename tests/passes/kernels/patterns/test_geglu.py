from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgraph.passes.kernels.patterns.geglu import SPEC
from tests.inductor_ext.kernels.checks import assert_as_near, gradients
from tests.passes.kernels.test_substitute_kernels import substitute

ROOT = math.sqrt(2 / math.pi)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _fast_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _megatron(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _erf_last(x: Tensor) -> Tensor:
    return (torch.special.erf(0.7071067811865476 * x) + 1) * x / 2


def _half_last(x: Tensor) -> Tensor:
    return 0.5 * (x * (1 + (ROOT * (x + 0.044715 * (x * x * x))).tanh()))


def _half_first(x: Tensor) -> Tensor:
    return x * (0.5 * (1 + torch.erf(x * math.sqrt(0.5))))


def _of_a_multiple(x: Tensor) -> Tensor:
    return _erf(2 * x)


def _in_float32(x: Tensor) -> Tensor:
    return _erf(x.float()).type_as(x)


EXACT = {
    "F.gelu": F.gelu,
    "nn.GELU": nn.GELU(),
    "F.gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "nn.GELU tanh": nn.GELU(approximate="tanh"),
}
WRITTEN_OUT = {
    item.__name__: item
    for item in (new_gelu, _fast_gelu, _megatron, _erf, _erf_last, _half_last, _half_first, _of_a_multiple, _in_float32)
}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 3, 16).to(dtype).requires_grad_() for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", [*EXACT, *WRITTEN_OUT])
def test_every_spelling_is_found_and_means_the_same(spelling, dtype):
    gelu = (EXACT | WRITTEN_OUT)[spelling]
    inputs = _inputs(dtype)
    gm, record, result = substitute(lambda a, b: gelu(a) * b, *inputs, kernels=[SPEC])
    assert record.changed == 1 and record.notes == ()
    assert not any(name in gm.code for name in ("gelu(", "erf(", "tanh(", "pow"))
    plain = gelu(inputs[0]) * inputs[1]
    ours, theirs = [result, *gradients(result, inputs)], [plain, *gradients(plain, inputs)]
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6 if spelling in WRITTEN_OUT else 1e-6)
    else:
        wide = tuple(item.detach().float().requires_grad_() for item in inputs)
        truth = gelu(wide[0]) * wide[1]
        assert_as_near(ours, theirs, [truth, *gradients(truth, wide)])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a, b: F.gelu(a) * b[0], "its gate is [2, 3, 16] and its other half [3, 16]"),
        (
            lambda a, b: 0.5 * a * (1 + torch.tanh(ROOT * (a + 0.05 * a**3))) * b,
            "its tanh is of 0.7978846 x^1 + 0.03989423 x^3, that of a GELU of 0.7978846 x^1 + 0.03567741 x^3",
        ),
        (lambda a, b: 0.5 * a * (1 + torch.tanh(ROOT * (a + 0.044715 * a**2))) * b, "0.03567741 x^2, that of a GELU"),
        (lambda a, b: 0.5 * a * (1 + torch.erf(a / 1.414)) * b, "its erf is of 0.7072136 x^1"),
        (lambda a, b: a * (1 + torch.erf(a / math.sqrt(2))) * b, "it is multiplied by 1.0, a GELU by 0.5"),
        (lambda a, b: (h := F.gelu(a)) * b + h, "which it computes on the way, is read by add as well"),
    ],
)
def test_near_misses_are_left_alone_and_named(function, reason):
    inputs = _inputs(torch.float32)
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and reason in record.notes[0]
    assert torch.equal(result, function(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: F.gelu(a) + b,
        lambda a, b: 30 * torch.tanh(a / 30) * b,
        lambda a, b: 0.5 * b * (1 + torch.tanh(a)) * b,
        lambda a, b: 0.5 * a * (1 + torch.erf(a / 1.4)) + b,
        lambda a, b: 0.5 * a * (1 + 2 * torch.erf(a / math.sqrt(2))) * b,
        lambda a, b: 0.5 * a * torch.add(1, torch.erf(a / math.sqrt(2)), alpha=2) * b,
        lambda a, b: 0.5 * a * (1 + torch.erf(torch.exp(a) / math.sqrt(2))) * b,
    ],
)
def test_other_uses_of_its_ops_are_none_of_its_business(function):
    inputs = _inputs(torch.float32)
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.notes == ()
    assert torch.equal(result, function(*inputs))


def test_a_long_polynomial_is_no_gelu_and_takes_no_time():
    def function(x: Tensor, z: Tensor) -> Tensor:
        y = x
        for _ in range(30):  # read twice each time: 2^30 readings of x
            y = y * y + 0.1
        return (1 + torch.tanh(y)) * z

    _, record, _ = substitute(function, torch.zeros(3), torch.ones(3), kernels=[SPEC])
    assert record.changed == 0
