from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgraph.passes.kernels.patterns.layer_norm import SPEC
from dsgraph.passes.kernels.registry import KERNELS
from tests.passes.kernels.patterns.cases import Cases, by_name, randn
from tests.passes.kernels.test_substitute_kernels import substitute

WIDTH, EPS = 16, 1e-5


def _by_var(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    v = x.float()
    h = (v - v.mean(-1, keepdim=True)) / torch.sqrt(v.var(-1, keepdim=True, unbiased=False) + EPS)
    return h.type_as(x) * w + b


def _by_var_in_place(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    v = x.float()
    h = (v - torch.mean(v, dim=2, keepdim=True)) * torch.rsqrt(EPS + torch.var(v, -1, False, True))
    return torch.add(b, w * h.to(x.dtype))


def _by_correction(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    v = x.float()
    h = (v - v.mean((-1,), True)) * (v.var(-1, correction=0, keepdim=True) + EPS) ** -0.5
    return (h * w.float() + b.float()).to(x.dtype)


def _by_squares(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    v = x.float()
    d = v - v.mean(-1, keepdim=True)
    return (w * (d / torch.sqrt(d.square().mean(-1, keepdim=True) + EPS)) + b).to(x.dtype)


def _cohere(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    x = (x - mean) * torch.rsqrt(variance + EPS)
    x = w.to(torch.float32) * x
    return x.to(dtype) + 0 * b


def _bias_alone(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    v = x.float()
    h = (v - v.mean(-1, keepdim=True)) / (v.var(-1, keepdim=True, unbiased=False) + EPS).sqrt()
    return h.to(x.dtype) + b + 0 * w


def _functional(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), w, b, EPS)


def _functional_without_parameters(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, [WIDTH]) * w + b


SPELLINGS = [
    *(_by_var, _by_var_in_place, _by_correction, _by_squares, _cohere, _bias_alone),
    *(_functional, _functional_without_parameters),
]


GONE = ("sqrt", "mean", "var(", "pow", "functional")


def _inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return randn((2, 3, WIDTH), (WIDTH,), (WIDTH,), dtype=dtype, mean=0.5)


def test_it_is_not_taken_for_the_rms_norm_of_a_difference():
    inputs = _inputs(torch.float32)
    gm, record, _ = substitute(_by_squares, *inputs, kernels=KERNELS)
    assert record.changed == 1 and "dsgraph.layer_norm" in gm.code and "rms_norm" not in gm.code


def test_modules_of_torch_and_their_parameters():
    module, x = nn.LayerNorm(WIDTH), _inputs(torch.float32)[0]
    _, record, result = substitute(module, x, kernels=[SPEC])
    assert record.changed == 1
    torch.testing.assert_close(result, module(x), rtol=1e-6, atol=1e-6)


def test_of_torch_s_own_nothing_is_to_gain():
    _, record, _ = substitute(_functional, *_inputs(torch.float32), kernels=[SPEC], asked=False)
    assert record.changed == 0 and "because nothing is gained: torch's own is one kernel as well" in record.notes[0]


def _norm(x: Tensor, *, numerator: Tensor | None = None, variance: Tensor | None = None) -> Tensor:
    top = x - x.mean(-1, keepdim=True) if numerator is None else numerator
    return top / torch.sqrt((x.var(-1, keepdim=True, unbiased=False) if variance is None else variance) + EPS)


_NEAR_MISSES = [
    (lambda x, w, b: _written_to_in_between(x, w, b), "layer_norm is not substituted"),
    (lambda x, w, b: _norm(x, variance=x.var(-1, keepdim=True)), "its variance is unbiased"),
    (lambda x, w, b: _norm(x, variance=x.var(-1, correction=1, keepdim=True)), "its variance is unbiased"),
    (lambda x, w, b: _norm(x, variance=x.var(1, False, True)), "its variance is over dimension 1, not over the"),
    (lambda x, w, b: _norm(x[0, 0], variance=x[0, 0].var(-1, False)), "its variance drops the dimension"),
    (lambda x, w, b: _norm(x, numerator=x), "what is divided by the root is not what has that variance"),
    (lambda x, w, b: _norm(x, numerator=x - x.mean(1, keepdim=True)), "what is divided by the root is not what"),
    (lambda x, w, b: _norm(x, numerator=x - x.mean()), "what is divided by the root is not what"),
    (lambda x, w, b: _norm(x, numerator=w - x.mean(-1, keepdim=True)), "what is divided by the root is not what"),
    (lambda x, w, b: _norm(x.bfloat16()), "its statistics are in torch.bfloat16"),
    (
        lambda x, w, b: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, False, True) + w[:1]),
        "not a number",
    ),
    (lambda x, w, b: F.layer_norm(x, x.shape[-2:]), "it is over the last 2 dimensions"),
    (lambda x, w, b: (m := x.mean(-1, keepdim=True)) + _norm(x, numerator=x - m), "is read by"),
]


def _written_to_in_between(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = x.clone()
    mean = x.mean(-1, keepdim=True)
    x.mul_(2)
    return (x - mean) / torch.sqrt(x.var(-1, False, True) + EPS)


def test_a_gate_or_a_residual_is_not_taken_for_a_parameter():
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return _norm(x) * x + x

    inputs = _inputs(torch.float32)
    gm, record, result = substitute(function, *inputs, kernels=[SPEC])
    assert record.changed == 1 and "None, None, 1e-05" in gm.code
    torch.testing.assert_close(result, function(*inputs), rtol=1e-5, atol=1e-5)


def test_parameters_in_float64_are_not_read_in_float32():
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return _norm(x) * w.double() + b.double()

    inputs = _inputs(torch.float32)
    gm, record, result = substitute(function, *inputs, kernels=[SPEC])
    assert record.changed == 1 and "None, None, 1e-05" in gm.code and result.dtype == torch.float64
    torch.testing.assert_close(result, function(*inputs), rtol=1e-5, atol=1e-5)


CASES = Cases(
    SPEC,
    _inputs,
    spellings=by_name(*SPELLINGS),
    gone=GONE,
    tolerance=(1e-5, 1e-5),
    near_misses=_NEAR_MISSES,
)
