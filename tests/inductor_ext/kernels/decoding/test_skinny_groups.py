from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels.decoding import skinny_cpp
from dsgraph.inductor_ext.kernels.decoding import skinny_groups as kernel
from tests.inductor_ext.kernels.checks import run_interpreted

OP = torch.ops.dsgraph.skinny_groups
# Leading dimensions of the input, groups of a row, half a group, rows of the weight.
SHAPES = [((1, 1), 2, 64, 48), ((2,), 3, 8, 17), ((3, 1), 1, 20, 33), ((16,), 4, 16, 21), ((), 2, 3, 5)]
NEAR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def _inputs(shape: tuple[tuple[int, ...], int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    lead, groups, half, n = shape
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (n, groups, half), dtype=torch.uint8)
    return torch.randn(*lead, 2 * groups * half).to(dtype), packed, torch.rand(n, groups) / 15, torch.randn(n, groups)


def _expected(x: Tensor, packed: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    numbers = torch.cat([packed & 15, packed >> 4], 2).double()
    return x.double() @ (numbers * scale[..., None] + least[..., None]).flatten(1).t()


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_of_the_weight_in_every_form(shape, dtype):
    given = _inputs(shape, dtype)
    expected = _expected(*given)
    for compute in (OP, kernel.traceable, kernel.reference):
        _assert_near(compute(*given), expected, dtype)


def _assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    near = NEAR[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near * float(expected.abs().max()))


def test_torch_takes_them_for_well_formed_ops():
    given = _inputs(SHAPES[0], torch.float32)
    torch.library.opcheck(OP.default, given)
    torch.library.opcheck(skinny_cpp.skinny_product_groups, (*given, torch.randn(48)))


def test_a_bias_is_added_once():
    given, bias = _inputs(SHAPES[1], torch.bfloat16), torch.randn(17).bfloat16()
    found = skinny_cpp.skinny_product_groups(*given, bias)
    _assert_near(found, _expected(*given) + bias.double(), torch.bfloat16)


def test_what_it_cannot_take_is_said():
    x, *weight = _inputs(SHAPES[0], torch.float32)
    assert kernel.supports(x, *weight) is None
    packed, scale, least = weight
    assert skinny_cpp.takes_groups(x, *weight)
    assert not skinny_cpp.takes_groups(x, packed, scale.bfloat16(), least)
    assert "its scales are torch.bfloat16" in (kernel.supports(x, packed, scale.bfloat16(), least) or "")
    assert "its input has 17 rows" in (kernel.supports(x.expand(1, 17, -1), *weight) or "")
    assert "its input 100 columns" in (kernel.supports(x[..., :100], *weight) or "")


@pytest.mark.slow
def test_the_triton_kernel_gives_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype in itertools.product(SHAPES, NEAR):
        if dtype == torch.bfloat16 and len(shape[0]) and shape[0][0] > 1:
            continue  # the interpreter's `tl.dot` does not know it
        given = _inputs(shape, dtype)
        _assert_near(kernel.launch(*given), _expected(*given), dtype)
