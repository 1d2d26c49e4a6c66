from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgraph.passes.kernels.patterns.rms_norm import SPEC
from tests.passes.kernels.patterns.cases import Cases, by_name, randn
from tests.passes.kernels.test_substitute_kernels import substitute

WIDTH, EPS = 16, 1e-5


def _upcast(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * w


def _type_as(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x) * w


def _transformers_llama(x: Tensor, w: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return w * x.to(dtype)


def _transformers_gemma(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    output = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)
    output = output * (1.0 + w.float())
    return output.type_as(x)


def _transformers_gemma3n(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.pow(v.pow(2).mean(-1, keepdim=True) + EPS, -0.5) * w.float()).type_as(x)


def _all_in_float32(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt((v * v).mean(-1, keepdim=True) + EPS) * w.float()).to(x.dtype)


def _cast_twice(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return (x.float() * scale).type_as(x) * w


def _divided_by_the_root(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v / torch.sqrt(torch.mean(torch.square(v), dim=-1, keepdim=True) + EPS)).to(x.dtype) * w


def _times_one_over_the_root(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * (1 / (EPS + (v**2).mean(dim=(-1,), keepdim=True)).sqrt())).to(x.dtype) * w


def _times_the_reciprocal(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.reciprocal(torch.sqrt(v.pow(2).mean(2, True) + EPS))).to(x.dtype).mul(w)


def _functional(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), w, EPS)


def _functional_without_epsilon(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), w)


def _functional_without_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), eps=EPS) + w


def _without_weight(x: Tensor, w: Tensor) -> Tensor:
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) + 0 * w


SPELLINGS = [
    *(_upcast, _type_as, _transformers_llama, _transformers_gemma, _transformers_gemma3n, _all_in_float32),
    _cast_twice,
    *(_divided_by_the_root, _times_one_over_the_root, _times_the_reciprocal),
    *(_functional, _functional_without_epsilon, _functional_without_weight, _without_weight),
]


def _inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, w = randn((2, 3, WIDTH), (WIDTH,), dtype=dtype)
    return x, w.detach().abs().add(0.5).requires_grad_()


def test_modules_of_torch_and_their_parameters():
    module = nn.RMSNorm(WIDTH)
    x = _inputs(torch.float32)[0]
    _, record, result = substitute(module, x, kernels=[SPEC])
    assert record.changed == 1
    torch.testing.assert_close(result, module(x), rtol=1e-6, atol=1e-6)


def _over_the_first_dimension(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + EPS) * w


def _over_two_dimensions(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + EPS) * w


def _fourth_power(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS) * w


def _something_else_is_divided(x: Tensor, w: Tensor) -> Tensor:
    return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def _epsilon_is_a_tensor(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[:1]) * w


def _over_the_last_two(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-2:]) * w


_NEAR_MISSES = [
    (_over_the_first_dimension, "its mean is over dimension 0, not over the last"),
    (_over_two_dimensions, "its mean is over dimension (-2, -1), not over the last"),
    (_fourth_power, "it is the mean of the power 4, not of squares"),
    (_something_else_is_divided, "what was squared is not what is divided by the root"),
    (_epsilon_is_a_tensor, "not a number"),
    (_over_the_last_two, "it is over the last 2 dimensions"),
]


def test_statistics_in_low_precision_are_other_numbers():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w

    _, record, _ = substitute(function, *_inputs(torch.bfloat16), kernels=[SPEC], asked=False)
    assert record.changed == 0 and "its statistics are in torch.bfloat16" in record.notes[0]


def test_a_weight_that_is_rounded_first_is_taken_rounded():
    def function(x: Tensor, w: Tensor) -> Tensor:
        v = x.float()
        return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * (1 + w).to(x.dtype)

    x, w = _inputs(torch.bfloat16)
    w = w.float()
    _, record, result = substitute(function, x, w, kernels=[SPEC])
    assert record.changed == 1 and torch.equal(result, function(x, w))


def test_a_gate_is_not_taken_for_a_weight():
    def function(x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gate

    x, gate = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    gm, record, result = substitute(function, x, gate, kernels=[SPEC])
    assert record.changed == 1 and torch.equal(result, function(x, gate))
    assert "None, 1e-05" in gm.code


def test_a_sum_that_the_graph_rounds_is_the_weight():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1 + w)

    x, w = _inputs(torch.float32)
    for weight, offset in ((w.bfloat16(), 0.0), (w, 1.0)):
        gm, record, result = substitute(function, x, weight, kernels=[SPEC])
        assert record.changed == 1 and f"offset = {offset}" in gm.code
        assert torch.equal(result, function(x, weight))


CASES = Cases(
    SPEC,
    _inputs,
    spellings=by_name(*SPELLINGS),
    gone=("rsqrt",),
    tolerance=(1e-5, 1e-5),
    exact=[item.__name__ for item in SPELLINGS if "functional" not in item.__name__],  # ATen's own order of operations
    near_misses=_NEAR_MISSES,
)
