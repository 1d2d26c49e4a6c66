from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dsgraph.passes.kernels.patterns import rms_norm
from dsgraph.passes.kernels.patterns.add_rms_norm import SPEC
from dsgraph.passes.kernels.spec import Match, Setting
from tests.inductor_ext.kernels.checks import gradients
from tests.passes.kernels.patterns.cases import Cases, by_name, randn
from tests.passes.kernels.patterns.test_rms_norm import EPS, SPELLINGS, WIDTH
from tests.passes.kernels.test_substitute_kernels import substitute


def _inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return randn((2, 3, WIDTH), (2, 3, WIDTH), (WIDTH,), dtype=dtype, mean=0.5)


@pytest.mark.parametrize(
    "total",
    [
        lambda x, r: torch.add(x, r),
        lambda x, r: x.add(r),
        lambda x, r: torch.add(x, other=r, alpha=1),
        lambda x, r: x.float() + r.float(),
    ],
)
def test_every_sum_is_found(total):
    def layer(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        both = total(x, residual)
        return nn.functional.rms_norm(both.float(), (WIDTH,), w.float(), EPS), both

    inputs = _inputs(torch.bfloat16)
    gm, record, result = substitute(layer, *inputs, kernels=[SPEC])
    assert record.changed == 1 and "dsgraph.add_rms_norm" in gm.code and "torch.add(" not in gm.code
    torch.testing.assert_close(result, layer(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "total",
    [lambda x, r: x - r, lambda x, r: x * r, lambda x, r: (x + r) * 1, lambda x, r: (x + r).tanh()],
)
def test_what_is_no_sum_is_none(total):
    def layer(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
        return nn.functional.rms_norm(total(x, residual), (WIDTH,), w, EPS)

    gm, record, _ = substitute(layer, *_inputs(torch.float32), kernels=[SPEC], asked=False)
    assert record.changed == 0 and record.notes == () and "dsgraph" not in gm.code


def test_a_norm_that_is_none_is_named_by_its_own_kernel():
    def layer(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
        return (x + residual) * torch.rsqrt((x + residual).pow(4).mean(-1, keepdim=True) + EPS) * w

    _, record, _ = substitute(layer, *_inputs(torch.float32), kernels=[SPEC, rms_norm.SPEC], asked=False)
    (note,) = record.notes
    assert note.startswith("rms_norm is not substituted") and "it is the mean of the power 4" in note


def test_it_spares_a_kernel_each_way_more_than_the_norm_alone():
    place = Match(torch.fx.Graph().placeholder("x"), ())
    for training, more in ((True, 2), (False, 1)):
        alone, both = (
            spec.gain(place, Setting(fuses=False, device_type="cuda", training=training))
            for spec in (rms_norm.SPEC, SPEC)
        )
        assert both.kernels - alone.kernels == more
    fused = SPEC.gain(place, Setting(fuses=True, device_type="cuda", training=True))
    assert not fused.is_worth_it


def test_two_layers_hand_the_sum_on():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x))

    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.RMSNorm(WIDTH))
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    gm, record, result = substitute(model, x, kernels=[SPEC, rms_norm.SPEC])
    assert record.changed == 3 and gm.code.count("dsgraph.add_rms_norm.default") == 2
    plain = model(x)
    parameters = [x, *model.parameters()]
    torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(result, parameters), gradients(plain, parameters), rtol=1e-5, atol=1e-5)


def _layer(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def layer(x: Tensor, residual: Tensor, w: Tensor) -> Tensor:
        total = residual + x
        return total * w + norm(total, w).sin()

    return layer


CASES = Cases(
    SPEC,
    _inputs,
    spellings={name: _layer(norm) for name, norm in by_name(*SPELLINGS).items()},
    gone=("rsqrt",),
    tolerance=(1e-5, 1e-5),
)
