from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.inductor_ext.kernels import layer_norm as kernel
from tests.inductor_ext.kernels.checks import assert_as_near, gradients, run_interpreted, saved_bytes

OP = torch.ops.dsgraph.layer_norm
EPS = 1e-5
SHAPES = [(7,), (1, 2), (3, 7), (2, 5, 16), (4, 33), (1, 2, 3, 129)]
PARAMETERS = list(itertools.product([True, False], [True, False]))  # with weight, with bias
_Inputs = tuple[Tensor, Tensor | None, Tensor | None]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, weight: bool = True, bias: bool = True) -> _Inputs:
    torch.manual_seed(0)
    x = torch.randn(shape).add(2).to(dtype).requires_grad_()
    w, b = (torch.randn(shape[-1]).to(dtype).requires_grad_() for _ in range(2))
    return x, w if weight else None, b if bias else None


def _plain(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("weight", "bias"), PARAMETERS)
def test_values_and_gradients_are_those_of_plain_torch(shape, weight, bias):
    inputs = _inputs(shape, torch.float32, weight, bias)
    y, _, _ = OP(*inputs, EPS, dtype=torch.float32)
    plain = _plain(*inputs)
    torch.testing.assert_close(y, plain, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradients(y, inputs), gradients(plain, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("weight", "bias"), PARAMETERS)
def test_low_precision_is_as_near_to_float32_as_plain_torch(weight, bias):
    low = _inputs((8, 64), torch.bfloat16, weight, bias)
    wide = tuple(None if item is None else item.detach().float().requires_grad_() for item in low)
    ours, plain, truth = OP(*low, EPS, dtype=torch.bfloat16)[0], _plain(*low), _plain(*wide)
    assert_as_near([ours, *gradients(ours, low)], [plain, *gradients(plain, low)], [truth, *gradients(truth, wide)])


def test_gradients_are_derivatives():
    inputs = _inputs((3, 5), torch.float64)
    assert torch.autograd.gradcheck(lambda *given: OP(*given, EPS, dtype=torch.float64)[0], inputs)


@pytest.mark.parametrize(("weight", "bias"), PARAMETERS)
def test_torch_takes_it_for_a_well_formed_op(weight, bias):
    inputs = _inputs((3, 5), torch.float32, weight, bias)
    torch.library.opcheck(OP.default, (*inputs, EPS), {"dtype": torch.float32})
    x, w, b = (item if item is None else item.detach() for item in inputs)
    given = (torch.ones(3, 5), x, w, torch.ones(3, 1), torch.ones(3, 1))
    options = {"bias_dtype": None if b is None else b.dtype}
    torch.library.opcheck(torch.ops.dsgraph.layer_norm_backward.default, given, options)


def test_rows_far_from_zero_keep_their_variance():
    x = torch.randn(4, 64) + 10_000
    y, _, _ = OP(x, None, None, EPS, dtype=torch.float32)
    torch.testing.assert_close(y.double(), F.layer_norm(x.double(), (64,), eps=EPS), rtol=1e-3, atol=1e-3)


def test_no_more_is_saved_than_by_plain_torch():
    inputs = _inputs((16, 64), torch.bfloat16)
    ours = saved_bytes(lambda *given: OP(*given, EPS, dtype=torch.bfloat16)[0], *inputs)
    assert ours == 16 * 64 * 2 + 64 * 2 + 2 * 16 * 4  # x, weight, mean and rstd


@pytest.mark.slow
def test_the_triton_kernels_give_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, parameters in itertools.product(SHAPES, (torch.float32, torch.bfloat16), PARAMETERS):
        x, weight, bias = (item if item is None else item.detach() for item in _inputs(shape, dtype, *parameters))
        x = torch.cat((x, x), -1)[..., : shape[-1]]  # rows with a gap between them
        exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.016, "atol": 0.016}
        results = kernel.launch_forward(x, weight, bias, EPS, dtype=dtype)
        torch.testing.assert_close(results, kernel.reference(x, weight, bias, EPS, dtype=dtype), **exact)
        given = (torch.randn_like(x), x, weight, *results[1:])
        options = {"bias_dtype": None if bias is None else bias.dtype}
        ours, theirs = kernel.launch_backward(*given, **options), kernel.backward_reference(*given, **options)
        torch.testing.assert_close(ours, theirs, **exact)
