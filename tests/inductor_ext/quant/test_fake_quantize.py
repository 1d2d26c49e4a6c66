"""Fake quantisation: the grids of weights of few bits, straight-through gradients, rounding at random."""

from __future__ import annotations

import pytest
import torch

from dsgraph.inductor_ext import fake_quantize
from dsgraph.inductor_ext.quant.weights import dequantize_groups, dequantize_rows, quantize_groups, quantize_rows

_OP = torch.ops.dsgraph.fake_quantize.default


def _control(levels: float, share: float = 0.0, seed: int = 0) -> torch.Tensor:
    return torch.tensor([levels, share, float(seed)])


def _how(**more: object) -> dict[str, object]:
    return {"groups": 0, "transposed": False, "symmetric": True, "stochastic": False, **more}


def _weight(rows: int = 7, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("transposed", [False, True])
def test_eight_bits_are_those_of_inference(transposed):
    weight = _weight()
    given = weight.t().contiguous() if transposed else weight
    found = _OP(given, _control(127), **_how(transposed=transposed))
    assert found.shape == given.shape and found.is_contiguous()
    assert torch.equal(found.t() if transposed else found, dequantize_rows(*quantize_rows(weight)))


def test_four_bits_of_groups_are_those_of_inference():
    weight = _weight()
    found = _OP(weight, _control(15), **_how(groups=weight.numel() // 32, symmetric=False))
    assert torch.equal(found, dequantize_groups(*quantize_groups(weight, group=32)))


def test_parts_of_the_memory_share_a_scale():
    weight = torch.tensor([[1.0, 0.4], [10.0, 4.0]])
    assert torch.equal(_OP(weight, _control(1), **_how(groups=2)), torch.tensor([[1.0, 0.0], [10.0, 0.0]]))
    assert torch.equal(_OP(weight, _control(1), **_how(groups=1)), torch.tensor([[0.0, 0.0], [10.0, 0.0]]))


def test_a_share_of_the_weight_stays():
    weight = _weight()
    assert torch.equal(_OP(weight, _control(1, share=1), **_how()), weight)
    rounded = _OP(weight, _control(1), **_how())
    found = _OP(weight, _control(1, share=0.25), **_how())
    torch.testing.assert_close(found, 0.25 * weight + 0.75 * rounded)


def test_rounding_at_random_is_right_on_average_and_the_same_again():
    weight = torch.full((4, 5000), 0.3)
    weight[:, 0] = 1
    draws = [_OP(weight, _control(1, seed=seed), **_how(stochastic=True)) for seed in range(4)]
    again = _OP(weight, _control(1, seed=2), **_how(stochastic=True))
    assert torch.equal(draws[2], again) and not torch.equal(draws[1], draws[2])
    for draw in draws:
        assert set(draw.unique().tolist()) == {0.0, 1.0}
        assert draw[:, 1:].mean() == pytest.approx(0.3, abs=0.02)
    both = (draws[0][:, 1:] * draws[1][:, 1:]).mean()
    assert both == pytest.approx(0.09, abs=0.02), "the draws of two steps have nothing to do with each other"
    neighbours = (draws[0][:, 1:-1] * draws[0][:, 2:]).mean()
    assert neighbours == pytest.approx(0.09, abs=0.02)


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_go_straight_through(symmetric):
    weight = _weight().requires_grad_()
    grad = torch.randn(weight.shape)
    _OP(weight, _control(3), **_how(symmetric=symmetric)).backward(grad)
    assert torch.equal(weight.grad, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_op_is_well_defined(dtype):
    for how in (_how(), _how(groups=4, symmetric=False, stochastic=True), _how(transposed=True)):
        weight = _weight(8, 12).to(dtype)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(fake_quantize, (weight.requires_grad_(), _control(7)), how, test_utils=checks)
        assert _OP(weight, _control(7), **how).dtype is dtype


def test_a_row_of_zeros_stays():
    assert torch.equal(_OP(torch.zeros(2, 4), _control(127), **_how()), torch.zeros(2, 4))
