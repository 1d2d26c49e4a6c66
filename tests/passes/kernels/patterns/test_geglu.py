from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgraph.passes.kernels.patterns.geglu import SPEC
from tests.passes.kernels.patterns.cases import Cases, randn
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


_NEAR_MISSES = [
    (lambda a, b: F.gelu(a) * b[0], "its gate is [2, 3, 16] and its other half [3, 16]"),
    (
        lambda a, b: 0.5 * a * (1 + torch.tanh(ROOT * (a + 0.05 * a**3))) * b,
        "its tanh is of 0.7978846 x^1 + 0.03989423 x^3, that of a GELU of 0.7978846 x^1 + 0.03567741 x^3",
    ),
    (lambda a, b: 0.5 * a * (1 + torch.tanh(ROOT * (a + 0.044715 * a**2))) * b, "0.03567741 x^2, that of a GELU"),
    (lambda a, b: 0.5 * a * (1 + torch.erf(a / 1.414)) * b, "its erf is of 0.7072136 x^1"),
    (lambda a, b: a * (1 + torch.erf(a / math.sqrt(2))) * b, "it is multiplied by 1.0, a GELU by 0.5"),
    (lambda a, b: (h := F.gelu(a)) * b + h, "which it computes on the way, is read by add as well"),
]


_OTHERS = [
    lambda a, b: F.gelu(a) + b,
    lambda a, b: 30 * torch.tanh(a / 30) * b,
    lambda a, b: 0.5 * b * (1 + torch.tanh(a)) * b,
    lambda a, b: 0.5 * a * (1 + torch.erf(a / 1.4)) + b,
    lambda a, b: 0.5 * a * (1 + 2 * torch.erf(a / math.sqrt(2))) * b,
    lambda a, b: 0.5 * a * torch.add(1, torch.erf(a / math.sqrt(2)), alpha=2) * b,
    lambda a, b: 0.5 * a * (1 + torch.erf(torch.exp(a) / math.sqrt(2))) * b,
]


def test_a_long_polynomial_is_no_gelu_and_takes_no_time():
    def function(x: Tensor, z: Tensor) -> Tensor:
        y = x
        for _ in range(30):  # read twice each time: 2^30 readings of x
            y = y * y + 0.1
        return (1 + torch.tanh(y)) * z

    _, record, _ = substitute(function, torch.zeros(3), torch.ones(3), kernels=[SPEC])
    assert record.changed == 0


def _gated(gelu: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: gelu(a) * b


CASES = Cases(
    SPEC,
    lambda dtype: randn((2, 3, 16), (2, 3, 16), dtype=dtype),
    spellings={name: _gated(gelu) for name, gelu in (EXACT | WRITTEN_OUT).items()},
    gone=("gelu(", "erf(", "tanh(", "pow"),
    tolerance=(1e-6, 2e-6),
    near_misses=_NEAR_MISSES,
    others=_OTHERS,
)
