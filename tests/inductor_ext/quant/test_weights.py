"""Rounding, packing, and products with packed weights against products with the weight that they stand for."""

from __future__ import annotations

import pytest
import torch

from dsgraph.inductor_ext.kernels.decoding.skinny_linear import MOST_ROWS
from dsgraph.inductor_ext.quant.weights import (
    dequantize_groups,
    dequantize_rows,
    multiply_groups,
    multiply_rows,
    quantize_groups,
    quantize_rows,
)

CASES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]


@pytest.mark.parametrize(("dtype", "near"), CASES)
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("size", [(16, 32), (7, 96), (3, 256)])
def test_products_are_those_of_the_weight(dtype, near, rows, size):
    torch.manual_seed(0)
    weight, x = torch.randn(size), torch.randn(rows, size[1]).to(dtype)
    eight = quantize_rows(weight)
    four = quantize_groups(weight, group=16)
    for found, stands_for in (
        (multiply_rows(x, *eight), dequantize_rows(*eight)),
        (multiply_groups(x, *four), dequantize_groups(*four)),
    ):
        expected = x.float() @ stands_for.t()
        assert found.dtype == dtype
        assert (found.float() - expected).norm() / expected.norm() < near


def test_skinny_matmuls_that_need_gradients_have_them():
    x, weight = torch.randn(2, 32, requires_grad=True), torch.randn(8, 32)
    eight, four = quantize_rows(weight), quantize_groups(weight, group=16)
    for y, stands_for in (
        (multiply_rows(x, *eight), dequantize_rows(*eight)),
        (multiply_groups(x, *four), dequantize_groups(*four)),
    ):
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad, stands_for.sum(0).expand(2, -1))


def test_rounding_is_to_the_nearest_and_keeps_both_ends():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    packed, scale = quantize_rows(weight)
    assert packed.abs().amax(1).eq(127).all()
    assert (dequantize_rows(packed, scale) - weight).abs().le(scale[:, None] * 0.501).all()
    numbers, steps, least = quantize_groups(weight, group=16)
    assert numbers.shape == (8, 4, 8)
    error = (dequantize_groups(numbers, steps, least) - weight).abs().unflatten(1, (4, 16))
    assert error.le(steps[..., None] * 0.501).all()


def test_a_row_of_zeros_stays_zeros():
    weight = torch.zeros(2, 32)
    assert dequantize_rows(*quantize_rows(weight)).eq(0).all()
    assert dequantize_groups(*quantize_groups(weight, group=16)).eq(0).all()
