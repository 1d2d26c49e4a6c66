from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels import attention as kernel
from tests.inductor_ext.kernels.checks import assert_as_near

OP = torch.ops.dsgraph.attention
# Leading dimensions, queries, keys, width of a head, width of values.
SHAPES = [((), 3, 5, 8, 8), ((4,), 3, 3, 8, 8), ((2, 3), 5, 5, 16, 16), ((1, 2), 1, 7, 8, 4), ((2, 1), 9, 4, 1, 1)]


def _inputs(shape: tuple, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    lead, queries, keys, width, values = shape
    sizes = [(*lead, queries, width), (*lead, width, keys), (*lead, keys, values)]
    return tuple(torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes)  # type: ignore[return-value]


def _options(dtype: torch.dtype = torch.float32, **changes: object) -> dict:
    options = {"keeps": True, "fill": -math.inf, "scale": 0.3, "dropout_p": 0.0, "causal": False, "contiguous": False}
    return {**options, "dtype": dtype, **changes}


def _gradients(y: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad((y * torch.randn(y.shape).to(y.dtype)).float().sum(), inputs))


def _masked(shape: tuple, kind: str) -> tuple[Tensor | None, Tensor | None]:
    """A bias and a mask that leaves each row a score."""
    lead, queries, keys, *_ = shape
    torch.manual_seed(2)
    mask = torch.rand(queries, keys) < 0.5
    mask[:, 0] = True
    if kind == "bias":
        return torch.randn((*lead, queries, keys)), None
    return (None, mask if kind == "rows" else mask[:1]) if kind != "none" else (None, None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["none", "bias", "rows", "one row"])
def test_values_and_gradients_are_those_of_plain_torch(shape, kind):
    inputs, (bias, mask) = _inputs(shape), _masked(shape, kind)
    for options in (_options(), _options(fill=torch.finfo(torch.float32).min), _options(keeps=False, contiguous=True)):
        if not options["keeps"] and mask is not None:
            mask = ~mask
        ours, plain = OP(*inputs, bias, mask, **options), kernel.reference(*inputs, bias, mask, **options)
        assert ours.shape == plain.shape
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(_gradients(ours, inputs), _gradients(plain, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]])
def test_a_causal_mask_leaves_each_query_the_keys_up_to_its_own(shape):
    inputs, options = _inputs(shape), _options(causal=True)
    lower = torch.ones(shape[1], shape[2], dtype=torch.bool).tril()
    ours = OP(*inputs, None, None, **options)
    torch.testing.assert_close(ours, kernel.reference(*inputs, None, None, **options), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, kernel.reference(*inputs, None, lower, **_options()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_float32_as_plain_torch(dtype):
    low = _inputs(((2, 3), 16, 16, 32, 32), dtype)
    wide = tuple(item.detach().float().requires_grad_() for item in low)

    def plain(q: Tensor, keys: Tensor, v: Tensor) -> Tensor:
        return (q @ keys * 0.3).softmax(-1) @ v

    ours, theirs, truth = OP(*low, None, None, **_options(dtype)), plain(*low), plain(*wide)
    assert_as_near(
        [ours, *_gradients(ours, low)], [theirs, *_gradients(theirs, low)], [truth, *_gradients(truth, wide)]
    )


def test_dropout_keeps_the_expected_value():
    q, keys, v = _inputs(((1, 1), 4, 64, 8, 8))
    torch.manual_seed(3)
    draws = torch.stack([OP(q, keys, v.abs(), None, None, **_options(dropout_p=0.25)).detach() for _ in range(400)])
    plain = kernel.reference(q, keys, v.abs(), None, None, **_options()).detach()
    assert draws.std(0).amin() > 0
    assert ((draws.mean(0) - plain).abs() < 5 * draws.std(0) / math.sqrt(400)).all()


def test_rows_without_a_score_are_zero():
    inputs = _inputs(SHAPES[0])
    mask = torch.tensor([[True] * 5, [False] * 5, [True] * 5])
    y = OP(*inputs, None, mask, **_options())
    assert y[1].eq(0).all() and y[0].ne(0).any()
    assert kernel.reference(*inputs, None, mask, **_options())[1].isnan().all()


def test_a_contiguous_result_is_one():
    x = torch.randn(2, 5, 3, 8).transpose(1, 2)
    for contiguous in (True, False):
        y = OP(x, x.mT, x, None, None, **_options(contiguous=contiguous))
        assert y.is_contiguous() == contiguous


def test_torch_takes_it_for_a_well_formed_op():
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    for shape, causal in itertools.product(SHAPES[:1], (True, False)):
        options = _options(causal=causal and shape[1] == shape[2])
        torch.library.opcheck(OP.default, (*_inputs(shape), None, None), options, test_utils=checks)


def test_what_it_cannot_take():
    x, five = torch.ones(2, 3, 3), torch.ones(1, 1, 1, 3, 3)
    assert kernel.supports(x, x, x, None, None, **_options()) is None
    assert "not the same 2 to 4" in str(kernel.supports(five, five, five, None, None, **_options()))
    assert "not the same 2 to 4" in str(kernel.supports(x, x[0], x, None, None, **_options()))
    assert "torch.int64" in str(kernel.supports(x, x, x, None, None, **_options(torch.int64)))
