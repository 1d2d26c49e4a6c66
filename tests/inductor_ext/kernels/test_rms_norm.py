from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels import rms_norm as kernel
from tests.inductor_ext.kernels.checks import assert_as_near, run_interpreted

OP = torch.ops.dsgraph.rms_norm
SHAPES = [(7,), (1, 1), (3, 7), (2, 5, 16), (4, 33), (1, 2, 3, 129)]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, *, with_weight: bool = True) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    return x, torch.randn(shape[-1], dtype=dtype, requires_grad=True) if with_weight else None


def _options(dtype: torch.dtype, *, offset: float = 0.0, early: bool = True) -> dict:
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    return {"offset": offset, "norm_dtype": dtype if early else statistics, "dtype": dtype}


def _gradients(y: Tensor, inputs: tuple[Tensor | None, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    weights = torch.randn(y.shape).to(y.dtype)
    return list(torch.autograd.grad((y * weights).float().sum(), [item for item in inputs if item is not None]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_weight", [True, False])
def test_values_and_gradients_are_those_of_plain_torch(shape, offset, with_weight):
    inputs, options = _inputs(shape, torch.float32, with_weight=with_weight), _options(torch.float32, offset=offset)
    y, rstd = OP(*inputs, 1e-6, **options)
    plain, plain_rstd = kernel.reference(*inputs, 1e-6, **options)
    assert torch.equal(y, plain) and torch.equal(rstd, plain_rstd)
    torch.testing.assert_close(_gradients(y, inputs), _gradients(plain, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("early", "offset"), [*itertools.product([True, False], [0.0, 1.0])])
def test_low_precision_is_as_near_to_float32_as_plain_torch(early, offset):
    low = _inputs((8, 64), torch.bfloat16)
    wide = tuple(item.detach().float().requires_grad_() for item in low)
    options = _options(torch.bfloat16, early=early, offset=offset)
    ours, plain = OP(*low, 1e-6, **options)[0], kernel.reference(*low, 1e-6, **options)[0]
    truth = kernel.reference(*wide, 1e-6, **_options(torch.float32, offset=offset))[0]
    assert_as_near([ours, *_gradients(ours, low)], [plain, *_gradients(plain, low)], [truth, *_gradients(truth, wide)])


def test_gradients_are_derivatives():
    inputs, options = _inputs((3, 5), torch.float64), _options(torch.float64, offset=1.0)
    assert torch.autograd.gradcheck(lambda x, w: OP(x, w, 1e-6, **options)[0], inputs)


def test_torch_takes_it_for_a_well_formed_op():
    for with_weight in (True, False):
        inputs = _inputs((3, 5), torch.float32, with_weight=with_weight)
        torch.library.opcheck(OP.default, (*inputs, 1e-6), _options(torch.float32))
        grad, rstd = torch.ones(3, 5), torch.ones(3, 1)
        options = {"offset": 0.0, "norm_dtype": torch.float32}
        detached = [item if item is None else item.detach() for item in inputs]
        torch.library.opcheck(torch.ops.dsgraph.rms_norm_backward.default, (grad, *detached, rstd), options)


def test_mixed_dtypes_promote_as_the_reference():
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    options = {"offset": 0.0, "norm_dtype": torch.bfloat16, "dtype": torch.float32}
    y, _ = OP(x, weight, 1e-6, **options)
    assert y.dtype == torch.float32
    assert torch.equal(y, weight * kernel.reference(x, None, 1e-6, **(options | {"dtype": torch.bfloat16}))[0])


def test_rows_that_are_not_contiguous():
    x = torch.randn(8, 6).t()
    options = _options(torch.float32)
    assert torch.equal(OP(x, None, 1e-6, **options)[0], kernel.reference(x.contiguous(), None, 1e-6, **options)[0])


@pytest.mark.slow
def test_the_triton_kernels_give_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, offset in itertools.product(SHAPES, (torch.float32, torch.bfloat16), (0.0, 1.0)):
        for with_weight in (True, False):
            x, weight = (
                item if item is None else item.detach() for item in _inputs(shape, dtype, with_weight=with_weight)
            )
            x = torch.cat((x, x), -1)[..., : shape[-1]]  # rows with a gap between them
            weight = None if weight is None else torch.stack((weight, weight + 1), -1)[:, 0]  # as are its elements
            options = _options(dtype, offset=offset)
            y, rstd = kernel.launch_forward(x, weight, 1e-6, **options)
            plain, plain_rstd = kernel.reference(x, weight, 1e-6, **options)
            exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.016, "atol": 0.016}
            torch.testing.assert_close((y, rstd), (plain, plain_rstd), **exact)
            grad, keep = torch.randn_like(x), {"offset": offset, "norm_dtype": options["norm_dtype"]}
            ours = kernel.launch_backward(grad, x, weight, rstd, **keep)
            theirs = kernel.backward_reference(grad, x, weight, rstd, **keep)
            torch.testing.assert_close(ours, theirs, **exact)
    _roundings_are_those_of_the_reference()
    _doubles_are_computed_as_such()


def _roundings_are_those_of_the_reference() -> None:
    x = torch.tensor([5.0, -3.0, 1.0, -1.0]).repeat(3, 4)  # whose mean square is 9, in whatever order it is added up
    low_or_not = (torch.float16, torch.float32)  # of bfloat16 the interpreter cuts off digits, where GPUs round
    for norm_dtype, weight_dtype, offset in itertools.product(low_or_not, low_or_not, (0.0, 1.0)):
        weight = torch.randn(16).to(weight_dtype)
        options = {"offset": offset, "norm_dtype": norm_dtype, "dtype": torch.float32}
        y, plain = (compute(x, weight, 0.0, **options)[0] for compute in (kernel.launch_forward, kernel.reference))
        assert torch.equal(y, plain), (norm_dtype, weight_dtype, offset)


def _doubles_are_computed_as_such() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    for given, norm_dtype in ((weight.double(), torch.float32), (weight, torch.float64)):
        options = {"offset": 1.0, "norm_dtype": norm_dtype, "dtype": torch.float64}
        y, _ = OP(x, given, 1e-6, **options)
        assert torch.equal(y, kernel.reference(x, given, 1e-6, **options)[0])
