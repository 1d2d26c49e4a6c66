from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.inductor_ext.kernels import add_layer_norm as kernel
from tests.inductor_ext.kernels.checks import assert_as_near, run_interpreted, saved_bytes

OP = torch.ops.dsgraph.add_layer_norm
EPS = 1e-5
SHAPES = [(7,), (1, 2), (3, 7), (2, 5, 16), (4, 33), (1, 2, 3, 129)]
PARAMETERS = list(itertools.product([True, False], [True, False]))  # with weight, with bias
READ = ["y", "total", "both"]  # what of the results has a gradient
_Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, weight: bool = True, bias: bool = True) -> _Inputs:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).add(1).to(dtype).requires_grad_() for _ in range(2))
    w, b = (torch.randn(shape[-1]).to(dtype).requires_grad_() for _ in range(2))
    return x, residual, w if weight else None, b if bias else None


def _plain(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, x.shape[-1:], weight, bias, EPS), total


def _ours(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    y, total, _, _ = OP(*inputs, EPS, dtype=inputs[0].dtype)
    return y, total


def _gradients(results: tuple[Tensor, Tensor], inputs: _Inputs, read: str = "both") -> list[Tensor]:
    weights = torch.randn(2, *results[0].shape, generator=torch.Generator().manual_seed(1))
    products = [result.float() * weight for result, weight in zip(results, weights, strict=True)]
    loss = {"y": products[0], "total": products[1], "both": products[0] + products[1]}[read].sum()
    given = [item for item in inputs if item is not None]
    return list(torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("weight", "bias"), PARAMETERS)
def test_values_and_gradients_are_those_of_plain_torch(shape, weight, bias):
    inputs = _inputs(shape, torch.float32, weight, bias)
    torch.testing.assert_close(_ours(*inputs), _plain(*inputs), rtol=1e-6, atol=2e-6)
    for read in READ:
        ours, plain = (_gradients(compute(*inputs), inputs, read) for compute in (_ours, _plain))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("weight", "bias"), PARAMETERS)
def test_low_precision_is_as_near_to_float32_as_plain_torch(weight, bias):
    low = _inputs((8, 64), torch.bfloat16, weight, bias)
    wide = tuple(None if item is None else item.detach().float().requires_grad_() for item in low)
    ours, plain, truth = _ours(*low), _plain(*low), _plain(*wide)
    assert torch.equal(ours[1], plain[1])
    of_sum = _plain(plain[1].detach().float(), torch.zeros(8, 64), *wide[2:])[0]  # the sum is rounded: it is given
    assert_as_near([ours[0]], [plain[0]], [of_sum])
    assert_as_near(_gradients(ours, low), _gradients(plain, low), _gradients(truth, wide))


@pytest.mark.parametrize("read", READ)
def test_gradients_are_derivatives(read):
    inputs = _inputs((3, 5), torch.float64)
    chosen = {"y": slice(0, 1), "total": slice(1, 2), "both": slice(0, 2)}[read]
    assert torch.autograd.gradcheck(lambda *given: _ours(*given)[chosen], inputs)


@pytest.mark.parametrize(("weight", "bias"), PARAMETERS)
def test_torch_takes_it_for_a_well_formed_op(weight, bias):
    inputs = _inputs((3, 5), torch.float32, weight, bias)
    torch.library.opcheck(OP.default, (*inputs, EPS), {"dtype": torch.float32})
    total, _, w, b = (item if item is None else item.detach() for item in inputs)
    grad, one = torch.ones(3, 5), torch.ones(3, 1)
    options = {"bias_dtype": None if b is None else b.dtype}
    for grad_total in (None, grad):
        given = (grad, grad_total, total, w, one, one)
        torch.library.opcheck(torch.ops.dsgraph.add_layer_norm_backward.default, given, options)


def test_no_more_is_saved_than_by_plain_torch():
    inputs = _inputs((16, 64), torch.bfloat16)
    ours = saved_bytes(lambda *given: _ours(*given)[0], *inputs)
    assert ours == 16 * 64 * 2 + 64 * 2 + 2 * 16 * 4  # total, weight, mean and rstd


def test_sums_that_it_cannot_make_are_named():
    said = kernel.supports(torch.zeros(3, 5), torch.zeros(1, 5), None, None, EPS)
    assert said == "it is of the sum of [3, 5] and [1, 5], where one shape is expected"


@pytest.mark.slow
def test_the_triton_kernels_give_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, parameters in itertools.product(SHAPES, (torch.float32, torch.float16), PARAMETERS):
        given = _inputs(shape, dtype, *parameters)
        x, residual, weight, bias = (item if item is None else item.detach() for item in given)
        residual = torch.cat((residual, residual), -1)[..., : shape[-1]]  # rows with a gap between them
        exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.002, "atol": 0.004}
        results = kernel.launch_forward(x, residual, weight, bias, EPS, dtype=dtype)
        plain = kernel.reference(x, residual, weight, bias, EPS, dtype=dtype)
        assert torch.equal(results[1], plain[1])
        torch.testing.assert_close(results, plain, **exact)
        for grad_total in (None, torch.cat((x, x), -1)[..., : shape[-1]]):
            saved = (torch.randn_like(x), grad_total, results[1], weight, *results[2:])
            options = {"bias_dtype": None if bias is None else bias.dtype}
            ours, theirs = kernel.launch_backward(*saved, **options), kernel.backward_reference(*saved, **options)
            torch.testing.assert_close(ours, theirs, **exact)
