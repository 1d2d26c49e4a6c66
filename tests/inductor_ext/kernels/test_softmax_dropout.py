from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsgraph.inductor_ext.kernels import softmax_dropout as kernel
from tests.covering import covering
from tests.inductor_ext.kernels.checks import assert_as_near, gradients, run_interpreted, saved_bytes

OP = torch.ops.dsgraph.softmax_dropout
SHAPES = [(7,), (1, 1), (3, 2), (2, 5, 16), (4, 33), (0, 4), (1, 2, 3, 129)]
# dtype of the input, of the softmax, of the result
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float32),
    (torch.float32, torch.float32, torch.float16),
    (torch.float32, torch.float64, torch.float32),
    (torch.float64, torch.float64, torch.float64),
]


def _input(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).mul(3).to(dtype).requires_grad_()


def _plain(x: Tensor, p: float, *, softmax_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    return F.dropout(F.softmax(x, -1, dtype=softmax_dtype).to(dtype), p)


def _same(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"softmax_dtype": dtype, "dtype": dtype}


def _seeded(function, *args, **options):
    torch.manual_seed(5)
    return function(*args, **options)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (5, 1000)])
def test_values_are_those_of_plain_torch_with_the_same_seed(shape, dtypes):
    x, options = _input(shape, dtypes[0]), {"softmax_dtype": dtypes[1], "dtype": dtypes[2]}
    for p in (0.0, 0.1, 0.5):
        (y, kept), plain = _seeded(OP, x, p, **options), _seeded(_plain, x, p, **options)
        assert torch.equal(y, plain) and y.dtype == dtypes[2]
        assert kept.dtype == torch.bool and kept.shape == x.shape and not y[~kept].any()


def test_the_generator_goes_on_as_after_plain_torch():
    x, after = _input((5, 1000)), []
    for function in (OP, _plain):
        _seeded(function, x, 0.1, **_same(x.dtype))
        after.append(torch.rand(4))
    assert torch.equal(*after)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_plain_torch(shape):
    x = _input(shape)
    for p in (0.0, 0.3):
        (y, _), plain = _seeded(OP, x, p, **_same(x.dtype)), _seeded(_plain, x, p, **_same(x.dtype))
        torch.testing.assert_close(gradients(y, [x]), gradients(plain, [x]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_float32_as_plain_torch(low):
    x = _input((16, 64), low)
    wide = x.detach().float().requires_grad_()
    for softmax_dtype in (torch.float32, low):
        options = {"softmax_dtype": softmax_dtype, "dtype": low}
        ours, plain = _seeded(OP, x, 0.2, **options)[0], _seeded(_plain, x, 0.2, **options)
        truth = _seeded(_plain, wide, 0.2, **_same(torch.float32))
        assert_as_near(
            [ours, *gradients(ours, [x])], [plain, *gradients(plain, [x])], [truth, *gradients(truth, [wide])]
        )


def test_gradients_are_derivatives():
    x = _input((3, 5), torch.float64)
    assert torch.autograd.gradcheck(lambda x: _seeded(OP, x, 0.4, **_same(torch.float64))[0], x)


def test_the_backward_goes_by_the_mask_that_it_is_given():
    x, grad, kept = _input((6, 9)).detach(), torch.randn(6, 9), torch.rand(6, 9) < 0.5
    x.requires_grad_()
    (plain,) = torch.autograd.grad((x.softmax(-1) * kept / 0.75 * grad).sum(), x)
    ours = torch.ops.dsgraph.softmax_dropout_backward(grad, x, kept, 0.25, softmax_dtype=torch.float32)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_all_or_nothing():
    x = _input((4, 9))
    y, kept = OP(x, 0.0, **_same(x.dtype))
    assert kept.all() and torch.equal(y, x.softmax(-1))
    y, kept = OP(x, 1.0, **_same(x.dtype))
    assert not kept.any() and not y.any() and not gradients(y, [x])[0].any()
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"p is {p}; a share from 0 to 1 is expected"):
            OP(x, p, **_same(x.dtype))


def test_rows_without_a_score_are_no_numbers_as_in_plain_torch():
    x = _input((3, 8)).detach()
    x[1] = -math.inf
    y, _ = _seeded(OP, x, 0.3, **_same(x.dtype))
    torch.testing.assert_close(y, _seeded(_plain, x, 0.3, **_same(x.dtype)), rtol=0, atol=0, equal_nan=True)
    assert y[1].isnan().all()


def test_torch_takes_it_for_a_well_formed_op():
    x = _input((3, 5))
    torch.library.opcheck(OP.default, (x, 0.0), _same(torch.float32))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the others compare two draws
    torch.library.opcheck(OP.default, (x, 0.5), _same(torch.float32), test_utils=checks)
    given = (torch.ones(3, 5), x.detach(), torch.rand(3, 5) < 0.5, 0.5)
    backward = torch.ops.dsgraph.softmax_dropout_backward.default
    torch.library.opcheck(backward, given, {"softmax_dtype": torch.float32})
    assert torch.Tag.nondeterministic_seeded in OP.default.tags
    assert torch.Tag.nondeterministic_seeded not in backward.tags


@pytest.mark.parametrize("dtypes", DTYPES)
def test_no_more_is_saved_than_by_plain_torch(dtypes):
    x, options = _input((8, 64), dtypes[0]), {"softmax_dtype": dtypes[1], "dtype": dtypes[2]}
    ours = saved_bytes(lambda x: OP(x, 0.5, **options)[0], x)
    plain_on_a_gpu = x.numel() * (dtypes[1].itemsize + 1)  # the softmax, and a mask in bytes; on the CPU in `dtype`
    assert ours == x.nbytes + x.numel() <= plain_on_a_gpu <= saved_bytes(lambda x: _plain(x, 0.5, **options), x)


@pytest.mark.parametrize("backend", ["aot_eager", "dsgraph"])
def test_calls_with_the_same_arguments_draw_each_its_own_numbers(backend):
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(OP(x, 0.5, **_same(x.dtype))[0] for _ in range(2))

    x = _input((8, 64))
    options = {"codegen": "eager"} if backend == "dsgraph" else None
    torch._dynamo.reset()
    ours = _seeded(torch.compile(function, backend=backend, options=options), x)
    assert not torch.equal(*ours)
    plain = _seeded(function, x)
    assert all(map(torch.equal, ours, plain))
    torch.testing.assert_close(gradients(ours[0] * ours[1], [x]), gradients(plain[0] * plain[1], [x]))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_computed_again_for_the_backward_has_the_same_numbers(compiled):
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: OP(x.sin(), 0.5, **_same(x.dtype))[0].cos(), x, use_reentrant=False)

    x = _input((8, 64))
    torch._dynamo.reset()
    call = torch.compile(function, backend="dsgraph", options={"codegen": "eager"}) if compiled else function
    plain = _seeded(lambda x: OP(x.sin(), 0.5, **_same(x.dtype))[0].cos(), x)
    ours = _seeded(call, x)
    torch.rand(100)
    assert torch.equal(ours, plain)
    torch.testing.assert_close(gradients(ours, [x]), gradients(plain, [x]), rtol=1e-5, atol=1e-6)


def test_what_it_cannot_take():
    assert kernel.supports(torch.ones(2, 3), 0.5) is None
    assert "torch.int64" in str(kernel.supports(torch.ones(3, dtype=torch.int64), 0.5))
    assert "a number" in str(kernel.supports(torch.ones(()), 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("function", ["interpreted", pytest.param("interpreted_in_all_ways", marks=pytest.mark.full)])
def test_the_triton_kernels_give_the_same(function):
    run_interpreted(__name__, function)


def interpreted() -> None:
    """Runs in a process of its own."""
    check_kernels("cpu", covering({"shape": SHAPES, "dtypes": DTYPES}, strength=1))


def interpreted_in_all_ways() -> None:
    """Runs in a process of its own."""
    check_kernels("cpu")


def check_kernels(device: str, members: Iterable[tuple[Any, ...]] | None = None) -> None:
    """The Triton kernels against the reference, given the elements that they keep."""
    for shape, (x_dtype, softmax_dtype, dtype) in members or itertools.product(SHAPES, DTYPES):
        options = {"softmax_dtype": softmax_dtype, "dtype": dtype}
        x = _input(shape, x_dtype).detach().to(device)
        if x.numel() == 0 or torch.float64 in (x_dtype, softmax_dtype):
            assert OP(x, 0.5, **options)[0].dtype == dtype
            continue
        x = torch.cat((x, x), -1)[..., : shape[-1]]  # rows with a gap between them
        y, kept = kernel.launch_forward(x, 0.25, dtype=dtype)
        expected = x.softmax(-1, dtype=torch.float32) * kept / 0.75
        low = torch.bfloat16 in (x_dtype, dtype)  # of bfloat16 the interpreter cuts off digits, where GPUs round
        exact = {"rtol": 0.008 if low else 0.001 if torch.float16 in (x_dtype, dtype) else 1e-5, "atol": 1e-6}
        torch.testing.assert_close(y, expected.to(dtype), **exact)
        wide = torch.randn((*shape[:-1], 2 * shape[-1]), dtype=dtype, device=device)
        grad, mask = wide[..., : shape[-1]], torch.cat((kept, ~kept), -1)[..., : shape[-1]]
        ours = kernel.launch_backward(grad, x, mask, 0.25)
        theirs = kernel.backward_reference(grad, x, mask, 0.25, softmax_dtype=softmax_dtype)
        torch.testing.assert_close(ours, theirs, **exact)
    _the_share_that_is_kept(device)
    _each_element_and_each_call_has_numbers_of_its_own(device)
    _what_is_no_number_stays_none(device)
    _gradients_go_by_the_mask_of_the_forward(device)


def _the_share_that_is_kept(device: str) -> None:
    x = torch.randn(64, 1000, device=device)
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        torch.manual_seed(3)
        _, kept = kernel.launch_forward(x, p, dtype=x.dtype)
        spread = math.sqrt(p * (1 - p))  # of one element; shares of rows and columns are compared as well
        for share in (kept.float().mean(), kept.float().mean(0), kept.float().mean(1)):
            count = x.numel() / share.numel()
            assert ((share.cpu() - (1 - p)).abs() <= 5.5 * spread / math.sqrt(count)).all(), p


def _each_element_and_each_call_has_numbers_of_its_own(device: str) -> None:
    x = torch.zeros(64, 256, device=device)
    torch.manual_seed(3)
    first, second = (kernel.launch_forward(x, 0.5, dtype=x.dtype)[1] for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(kernel.launch_forward(x, 0.5, dtype=x.dtype)[1], first)
    signs = torch.stack((first.flatten(), second.flatten())).float() * 2 - 1
    for shift in (0, *range(1, 9), 64, 256, 512):
        one, other = (signs[0], signs[1]) if shift == 0 else (signs[0, :-shift], signs[0, shift:])
        assert (one * other).mean().abs() < 5 / math.sqrt(len(one)), shift


def _what_is_no_number_stays_none(device: str) -> None:
    x = torch.randn(3, 8, device=device)
    x[1] = -math.inf
    y, _ = kernel.launch_forward(x, 0.5, dtype=x.dtype)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def _gradients_go_by_the_mask_of_the_forward(device: str) -> None:
    x = torch.randn(5, 40, device=device, requires_grad=True)
    y, kept = OP(x, 0.5, **_same(x.dtype))
    (ours,) = torch.autograd.grad(y.sin().sum(), x)
    (plain,) = torch.autograd.grad((x.softmax(-1) * kept / 0.5).sin().sum(), x)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    assert not torch.equal(kept, _seeded(OP, x, 0.5, **_same(x.dtype))[1])


@pytest.mark.inductor
def test_inductor_fuses_it_with_its_neighbours():
    from torch._inductor.utils import run_and_get_code

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y, kept = OP(x * 2, 0.5, **_same(x.dtype))
        return y.sin(), kept

    x = _input((8, 64))
    torch._dynamo.reset()
    (result, kept), codes = run_and_get_code(torch.compile(step, backend="dsgraph"), x)
    assert all("torch.ops.dsgraph.softmax_dropout" not in code for code in codes)
    assert 0.3 < kept.float().mean() < 0.7
    plain = ((x * 2).softmax(-1) * kept / 0.5).sin()
    torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(result, [x]), gradients(plain, [x]), rtol=1e-5, atol=1e-5)


@pytest.mark.inductor
def test_with_torchs_own_generator_inductor_drops_what_plain_torch_drops():
    x = _input((8, 64))
    torch._dynamo.reset()
    options = {"inductor": {"fallback_random": True}}
    compiled = torch.compile(lambda x: OP(x, 0.5, **_same(x.dtype))[0], backend="dsgraph", options=options)
    ours, plain = _seeded(compiled, x), _seeded(_plain, x, 0.5, **_same(x.dtype))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradients(ours, [x]), gradients(plain, [x]), rtol=1e-5, atol=1e-6)
