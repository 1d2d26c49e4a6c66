from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgraph.passes.kernels.patterns.swiglu import SPEC
from tests.inductor_ext.kernels.checks import assert_as_near, gradients
from tests.passes.kernels.test_substitute_kernels import substitute

SPELLINGS = {
    "silu * b": lambda a, b: F.silu(a) * b,
    "b * silu": lambda a, b: b.mul(F.silu(a)),
    "module": lambda a, b: nn.SiLU()(a) * b,
    "(a * sigmoid) * b": lambda a, b: a * torch.sigmoid(a) * b,
    "b * (sigmoid * a)": lambda a, b: b * (a.sigmoid() * a),
    "a * (sigmoid * b)": lambda a, b: a * (torch.sigmoid(a) * b),
    "sigmoid * (a * b)": lambda a, b: torch.sigmoid(a) * (b * a),
    "in float32": lambda a, b: (F.silu(a.float()) * b.float()).type_as(a),
    "silu in float32": lambda a, b: F.silu(a, inplace=False).to(b.dtype) * b,
    "itself": lambda a, b: F.silu(a) * a + b * 0,
}


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 3, 16).to(dtype).requires_grad_() for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_found_and_means_the_same(spelling, dtype):
    inputs, plain_of = _inputs(dtype), SPELLINGS[spelling]
    gm, record, result = substitute(plain_of, *inputs, kernels=[SPEC])
    assert record.changed == 1 and "sigmoid" not in gm.code and "silu" not in gm.code and record.notes == ()
    plain = plain_of(*inputs)
    ours, theirs = [result, *gradients(result, inputs)], [plain, *gradients(plain, inputs)]
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    else:
        wide = tuple(item.detach().float().requires_grad_() for item in inputs)
        truth = plain_of(*wide)
        assert_as_near(ours, theirs, [truth, *gradients(truth, wide)])


def test_halves_of_a_chunk():
    def function(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return F.silu(x1) * x2

    x = torch.randn(3, 16)
    _, record, result = substitute(function, x, kernels=[SPEC])
    assert record.changed == 1 and torch.equal(result, function(x))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a, b: F.silu(a) * b[0], "its gate is [2, 3, 16] and its other half [3, 16]"),
        (lambda a, b: F.silu(a[:, :1]) * b, "its gate is [2, 1, 16] and its other half [2, 3, 16]"),
        (lambda a, b: a * torch.sigmoid(1.702 * a) * b, "its sigmoid is of 1.702 times what it lets through"),
        (lambda a, b: (h := F.silu(a)) * b + h, "which it computes on the way, is read by add as well"),
        (lambda a, b: (h := F.silu(a)) * b * h, "which it computes on the way, is read by"),
        (lambda a, b: (s := a.sigmoid()) * a * b + s, "which it computes on the way, is read by"),
    ],
)
def test_near_misses_are_left_alone_and_named(function, reason):
    inputs = _inputs(torch.float32)
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and reason in record.notes[0]
    assert torch.equal(result, function(*inputs))


def _writes_to_the_gate(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    h = F.silu(a)
    a.mul_(2)
    return h * b


def test_a_gate_that_is_written_to_before_the_product():
    inputs = _inputs(torch.float32)
    _, record, result = substitute(_writes_to_the_gate, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "writes to what it reads before it is through" in record.notes[0]
    assert torch.equal(result, _writes_to_the_gate(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: F.silu(a) + b,
        lambda a, b: F.silu(a) * 2 + b,
        lambda a, b: torch.sigmoid(a) * b,  # GLU
        lambda a, b: a * torch.sigmoid(b) * 3,
        lambda a, b: a * torch.sigmoid(a) + b,
        lambda a, b: F.silu(a.clone(), inplace=True) * b,
    ],
)
def test_other_uses_of_its_ops_are_none_of_its_business(function):
    inputs = _inputs(torch.float32)
    _, record, result = substitute(function, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.notes == ()
    assert torch.equal(result, function(*inputs))


def test_what_it_spares_is_counted():
    inputs = _inputs(torch.float32)
    _, record, _ = substitute(lambda a, b: F.silu(a) * b, *inputs, kernels=[SPEC], asked=False)
    assert "nothing is to gain: on the CPU it is the same calls" in record.notes[0]
