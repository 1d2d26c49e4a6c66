from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels import few_rows_linear as kernel
from tests.inductor_ext.kernels.checks import assert_as_near, run_interpreted

OP = torch.ops.dsgraph.few_rows_linear
# Leading dimensions of the input, its columns, rows of the weight.
SHAPES = [((1, 1), 128, 48), ((1,), 130, 17), ((3, 2), 200, 33), ((16,), 256, 64), ((), 7, 5)]


def _inputs(shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    lead, k, n = shape
    torch.manual_seed(0)
    return torch.randn(*lead, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_of_plain_torch_and_of_the_loop(shape):
    x, weight, bias = _inputs(shape, torch.float32)
    plain = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(OP(x, weight, bias, None), plain)
    torch.testing.assert_close(kernel.traceable(x, weight, bias, None), plain, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loop_is_as_near_to_float32_as_plain_torch(dtype):
    low = _inputs(SHAPES[2], dtype)
    truth = kernel.reference(*(item.float() for item in low), None)
    assert_as_near([kernel.traceable(*low, None)], [kernel.reference(*low, None)], [truth])


def test_int8_weights_have_a_scale_a_row():
    x, _, bias = _inputs(SHAPES[2], torch.float32)
    packed, scale = torch.randint(-127, 128, (33, 200), dtype=torch.int8), torch.rand(33) + 0.1
    expected = x @ (packed.float() * scale[:, None]).t() + bias
    for found in (OP(x, packed, bias, scale), kernel.traceable(x, packed, bias, scale)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


def test_torch_takes_it_for_a_well_formed_op():
    torch.library.opcheck(OP.default, (*_inputs(SHAPES[0], torch.float32), None))


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (torch.ones(17, 4), torch.ones(3, 4), "its input has 17 rows, where 1 to 16"),
        (torch.ones(0, 4), torch.ones(3, 4), "its input has 0 rows"),
        (torch.ones(1, 4), torch.ones(4), "its weight has 1 dimensions"),
        (torch.ones(1, 4), torch.ones(3, 4).half(), "its input is torch.float32 and its weight torch.float16"),
    ],
)
def test_what_it_cannot_take_is_said(x, weight, said):
    assert said in (kernel.supports(x, weight, None, None) or "")


@pytest.mark.slow
def test_the_triton_kernel_gives_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, biased in itertools.product(
        SHAPES, (torch.float32, torch.float16, torch.bfloat16), (False, True)
    ):
        if dtype == torch.bfloat16 and len(shape[0]) and shape[0][0] > 1:
            continue  # the interpreter's `tl.dot` does not know it
        x, weight, bias = _inputs(shape, dtype)
        given = (x, weight, bias if biased else None, None)
        near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.1}
        torch.testing.assert_close(kernel.launch(*given), kernel.reference(*given), **near)
    x, _, bias = _inputs(SHAPES[2], torch.float32)
    packed, scale = torch.randint(-127, 128, (33, 200), dtype=torch.int8), torch.rand(33) + 0.1
    given = (x, packed, bias, scale)
    torch.testing.assert_close(kernel.launch(*given), kernel.reference(*given), rtol=1e-4, atol=1e-2)
