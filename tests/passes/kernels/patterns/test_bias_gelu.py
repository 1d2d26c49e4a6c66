from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.passes.kernels.patterns.bias_gelu import SPEC
from dsgraph.passes.kernels.registry import KERNELS
from tests.passes.kernels.patterns.cases import Cases, randn
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


def _inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return randn((2, 3, 16), (16,), dtype=dtype)


def test_a_gate_with_a_bias_is_a_gate():
    def function(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x + b) * x

    gm, record, _ = substitute(function, *_inputs(torch.float32), kernels=KERNELS)
    assert record.changed == 1 and "dsgraph.geglu" in gm.code


_NEAR_MISSES = [
    (lambda x, b: _written_to_in_between(x, b), "writes to what it reads before it is through"),
    (lambda x, b: F.gelu(x[..., :1] + b), "its bias has 16 elements and its input 1 columns"),
    (lambda x, b: F.gelu(x + b[:1]), "its bias has 1 elements and its input 16 columns"),
    (lambda x, b: (z := x + b) + F.gelu(z), "which it computes on the way, is read by"),
    (lambda x, b: 0.5 * (z := x + b) * (1 + torch.erf(z / 1.4)), "its erf is of 0.7142857 x^1"),
]


def _written_to_in_between(x: Tensor, b: Tensor) -> Tensor:
    z = (x := x.clone()) + b
    x.mul_(2)
    return F.gelu(z)


_OTHERS = [
    lambda x, b: F.gelu(F.linear(x, b.expand(16, 16), b)),
    lambda x, b: F.gelu(x + x),
    lambda x, b: F.gelu(x + 1) + b,
    lambda x, b: F.gelu(torch.add(x, b, alpha=2)),
    lambda x, b: F.gelu(x.clone().add_(b)),
    lambda x, b: F.silu(x + b),
]

CASES = Cases(
    SPEC,
    _inputs,
    spellings=SPELLINGS,
    gone=("gelu(", "erf(", "tanh(", "pow", "add"),
    tolerance=(1e-6, 2e-6),
    near_misses=_NEAR_MISSES,
    others=_OTHERS,
)
