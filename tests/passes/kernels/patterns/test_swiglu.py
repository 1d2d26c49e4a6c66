from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsgraph.passes.kernels.patterns.swiglu import SPEC
from tests.passes.kernels.patterns.cases import Cases, randn
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


def _inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return randn((2, 3, 16), (2, 3, 16), dtype=dtype)


def test_halves_of_a_chunk():
    def function(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return F.silu(x1) * x2

    x = torch.randn(3, 16)
    _, record, result = substitute(function, x, kernels=[SPEC])
    assert record.changed == 1 and torch.equal(result, function(x))


_NEAR_MISSES = [
    (lambda a, b: _writes_to_the_gate(a, b), "writes to what it reads before it is through"),
    (lambda a, b: F.silu(a) * b[0], "its gate is [2, 3, 16] and its other half [3, 16]"),
    (lambda a, b: F.silu(a[:, :1]) * b, "its gate is [2, 1, 16] and its other half [2, 3, 16]"),
    (lambda a, b: a * torch.sigmoid(1.702 * a) * b, "its sigmoid is of 1.702 times what it lets through"),
    (lambda a, b: (h := F.silu(a)) * b + h, "which it computes on the way, is read by add as well"),
    (lambda a, b: (h := F.silu(a)) * b * h, "which it computes on the way, is read by"),
    (lambda a, b: (s := a.sigmoid()) * a * b + s, "which it computes on the way, is read by"),
]


def _writes_to_the_gate(a: Tensor, b: Tensor) -> Tensor:
    a = a.clone()
    h = F.silu(a)
    a.mul_(2)
    return h * b


_OTHERS = [
    lambda a, b: F.silu(a) + b,
    lambda a, b: F.silu(a) * 2 + b,
    lambda a, b: torch.sigmoid(a) * b,  # GLU
    lambda a, b: a * torch.sigmoid(b) * 3,
    lambda a, b: a * torch.sigmoid(a) + b,
    lambda a, b: F.silu(a.clone(), inplace=True) * b,
]


def test_what_it_spares_is_counted():
    inputs = _inputs(torch.float32)
    _, record, _ = substitute(lambda a, b: F.silu(a) * b, *inputs, kernels=[SPEC], asked=False)
    assert "because nothing is gained: on the CPU it is the same calls" in record.notes[0]


CASES = Cases(
    SPEC,
    _inputs,
    spellings=SPELLINGS,
    gone=("sigmoid", "silu"),
    near_misses=_NEAR_MISSES,
    others=_OTHERS,
)
