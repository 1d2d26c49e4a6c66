from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.passes.kernels.patterns import layer_norm
from dsgraph.passes.kernels.patterns.add_layer_norm import SPEC
from dsgraph.passes.kernels.registry import KERNELS
from dsgraph.passes.kernels.spec import Match, NearMiss, Setting
from tests.passes.kernels.patterns.cases import Cases, by_name, randn
from tests.passes.kernels.patterns.test_layer_norm import EPS, GONE, SPELLINGS, WIDTH
from tests.passes.kernels.test_substitute_kernels import substitute

ON_GPU = Setting(fuses=False, device_type="cuda", training=True)


def _inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return randn((2, 3, WIDTH), (2, 3, WIDTH), (WIDTH,), (WIDTH,), dtype=dtype, mean=0.5)


def test_a_norm_behind_the_sum_of_a_block_is_found_as_well():
    def post_norm(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(residual + x.tanh(), (WIDTH,), w, b, EPS)

    inputs = _inputs(torch.float32)
    _, record, result = substitute(post_norm, *inputs, kernels=KERNELS)
    assert any(line.startswith("add_layer_norm in 1 place") for line in record.done)
    torch.testing.assert_close(result, post_norm(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("total", "reason"),
    [
        (lambda x, r: x - r, None),
        (lambda x, r: x + 1, None),
        (lambda x, r: torch.sub(x, r, alpha=-1), None),
        (lambda x, r: torch.add(x, r, alpha=0.5), "what is added is multiplied by 0.5 first"),
        (lambda x, r: x + r[0], "it is of the sum of [2, 3, 16] and [3, 16], where one shape is expected"),
        (lambda x, r: x[:, :1] + r[:1], "it is of the sum of [2, 1, 16] and [1, 3, 16], where one shape is expected"),
        (lambda x, r: x + r.double(), "it is of the sum of torch.float32 and torch.float64"),
    ],
)
def test_what_is_no_such_sum_is_left_alone_and_near_misses_are_named(total, reason):
    def layer(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(total(x, residual), (WIDTH,))

    inputs = _inputs(torch.float32)
    gm, record, result = substitute(layer, *inputs, kernels=[SPEC], asked=False)
    assert record.changed == 0 and "dsgraph" not in gm.code and torch.equal(result, layer(*inputs))
    assert len(record.notes) == (reason is not None) and all(reason in note for note in record.notes)


def test_of_torch_s_own_the_sum_is_to_gain():
    def layer(x: Tensor, residual: Tensor, w: Tensor, b: Tensor, *, reads_the_sum: bool) -> Tensor:
        total = x + residual
        y = F.layer_norm(total, (WIDTH,), w, b, EPS)
        return y + total if reads_the_sum else y

    for reads_the_sum, spared in ((True, 2), (False, 1)):
        found: list[Match | NearMiss] = []

        def backend(gm, _, found=found):
            answers = map(SPEC.match, gm.graph.nodes)
            found.extend(answer for answer in answers if answer is not None)
            return gm

        torch._dynamo.reset()
        torch.compile(layer, backend=backend)(*_inputs(torch.float32), reads_the_sum=reads_the_sum)
        (match,) = found
        assert isinstance(match, Match)
        assert SPEC.gain(match, ON_GPU).kernels == spared and not layer_norm.SPEC.gain(match, ON_GPU).is_worth_it


def _layer(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def layer(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> Tensor:
        total = residual + x
        return total + norm(total, w, b).sin()

    return layer


CASES = Cases(
    SPEC,
    _inputs,
    spellings={name: _layer(norm) for name, norm in by_name(*SPELLINGS).items()},
    gone=GONE,
    tolerance=(1e-5, 1e-5),
)
