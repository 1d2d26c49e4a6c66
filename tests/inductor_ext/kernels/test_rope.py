from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels import rope as kernel
from tests.covering import covering
from tests.inductor_ext.kernels.checks import assert_as_near, gradients, run_interpreted, saved_bytes

OP = torch.ops.dsgraph.rope
# Of x, of the tables' leading dimensions.
SHAPES = [((2,), ()), ((5, 6), (5,)), ((2, 3, 5, 16), (2, 1, 5)), ((2, 3, 5, 10), (5,)), ((2, 2, 3, 5, 4), (1, 1, 5))]
WAYS = list(itertools.product([False, True], [False, True], [False, True]))  # interleaved, inverse, full tables


def _inputs(
    shape: tuple[int, ...], leading: tuple[int, ...], full: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    columns = shape[-1] if full else shape[-1] // 2
    tables = (torch.randn(*leading, columns).to(dtype) for _ in range(2))
    return torch.randn(shape).to(dtype).requires_grad_(), *tables


def _options(interleaved: bool, inverse: bool, dtype: torch.dtype) -> dict:
    return {"interleaved": interleaved, "inverse": inverse, "dtype": dtype}


def _plain(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    """As transformers' Llama and GPT-J do; their tables hold every angle twice."""
    if cos.shape[-1] != x.shape[-1]:
        cos, sin = (
            item.repeat_interleave(2, -1) if interleaved else torch.cat((item, item), -1) for item in (cos, sin)
        )
    x1, x2 = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = torch.stack((-x2, x1), -1).flatten(-2) if interleaved else torch.cat((-x2, x1), -1)
    return x * cos - turned * sin if inverse else x * cos + turned * sin


@pytest.mark.covering
@pytest.mark.parametrize(("interleaved", "inverse", "full"), WAYS)
@pytest.mark.parametrize(("shape", "leading"), SHAPES)
def test_values_and_gradients_are_those_of_plain_torch(shape, leading, interleaved, inverse, full):
    inputs = _inputs(shape, leading, full, torch.float32)
    y = OP(*inputs, **_options(interleaved, inverse, torch.float32))
    plain = _plain(*inputs, interleaved=interleaved, inverse=inverse)
    assert torch.equal(y, plain)
    torch.testing.assert_close(gradients(y, inputs[:1]), gradients(plain, inputs[:1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_low_precision_is_as_near_to_float32_as_plain_torch(interleaved):
    low = _inputs((4, 8, 64), (8,), True, torch.bfloat16)
    wide = (low[0].detach().float().requires_grad_(), *(item.float() for item in low[1:]))
    ours = OP(*low, **_options(interleaved, False, torch.bfloat16))
    plain, truth = (_plain(*inputs, interleaved=interleaved, inverse=False) for inputs in (low, wide))
    assert_as_near(
        [ours, *gradients(ours, low[:1])], [plain, *gradients(plain, low[:1])], [truth, *gradients(truth, wide[:1])]
    )


@pytest.mark.covering
@pytest.mark.parametrize(("interleaved", "inverse", "full"), WAYS)
def test_gradients_are_derivatives(interleaved, inverse, full):
    x, cos, sin = _inputs((3, 2, 6), (2,), full, torch.float64)
    options = _options(interleaved, inverse, torch.float64)
    assert torch.autograd.gradcheck(lambda x: OP(x, cos, sin, **options), (x,))


def test_the_inverse_undoes_it():
    x, angles = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    there = OP(x, angles.cos(), angles.sin(), **_options(False, False, torch.float64))
    back = OP(there, angles.cos(), angles.sin(), **_options(False, True, torch.float64))
    torch.testing.assert_close(back, x)


def test_torch_takes_it_for_a_well_formed_op():
    for interleaved, transposed in itertools.product([False, True], [False, True]):
        x, cos, sin = _inputs((2, 3, 4, 6), (2, 1, 4), True, torch.float32)
        x = x.detach().transpose(1, 2).contiguous().transpose(1, 2) if transposed else x.detach()
        options = _options(interleaved, False, torch.float32)
        torch.library.opcheck(OP.default, (x.requires_grad_(), cos, sin), options)
        torch.library.opcheck(torch.ops.dsgraph.rope_backward.default, (x.detach(), cos, sin), options)


def test_it_keeps_the_layout_of_heads_behind_time():
    heads = torch.randn(2, 5, 3, 8).transpose(1, 2)  # [batch, heads, time, n] as models have it
    cos, sin = torch.randn(2, 1, 5, 8)
    y = OP(heads, cos, sin, **_options(False, False, torch.float32))
    assert y.stride() == heads.stride() == _plain(heads, cos, sin, interleaved=False, inverse=False).stride()


def test_the_tables_alone_are_saved():
    x, cos, sin = _inputs((4, 8, 64), (8,), True, torch.float32)
    ours = saved_bytes(lambda x: OP(x, cos, sin, **_options(False, False, torch.float32)), x)
    plain = saved_bytes(lambda x: _plain(x, cos, sin, interleaved=False, inverse=False), x)
    assert ours == plain == cos.nbytes + sin.nbytes


def test_tables_that_need_a_gradient_are_refused():
    x, cos, sin = _inputs((4, 8), (4,), True, torch.float32)
    cos.requires_grad_()
    assert kernel.supports(x, cos, sin) == "its cosine needs a gradient, which the kernel does not compute"
    with pytest.raises(RuntimeError, match="cos or sin needs a gradient, which it does not compute; detach them"):
        OP(x, cos, sin, **_options(False, False, torch.float32))


def test_tables_of_no_dimension_are_refused():
    x, cos, sin = _inputs((4, 2), (4,), False, torch.float32)
    assert kernel.supports(x, cos, sin) is None
    assert kernel.supports(x, cos[0, 0], sin) == "its cosine has no dimension"
    assert kernel.supports(x, cos, sin[0, 0]) == "its sine has no dimension"


@pytest.mark.slow
@pytest.mark.parametrize("function", ["interpreted", pytest.param("interpreted_in_all_ways", marks=pytest.mark.full)])
def test_the_triton_kernels_give_the_same(function):
    run_interpreted(__name__, function)


_EITHER = (False, True)
_AXES: dict[str, Sequence[Any]] = {
    **{"sizes": SHAPES, "interleaved": _EITHER, "inverse": _EITHER, "full": _EITHER},
    "dtype": (torch.float32, torch.bfloat16),
}


def interpreted() -> None:
    """Runs in a process of its own."""
    _check(covering(_AXES))


def interpreted_in_all_ways() -> None:
    """Runs in a process of its own."""
    _check(itertools.product(*_AXES.values()))


def _check(members: Iterable[tuple[Any, ...]]) -> None:
    for (shape, leading), interleaved, inverse, full, dtype in members:
        x, cos, sin = _inputs(shape, leading, full, dtype)
        x, options = x.detach(), _options(interleaved, inverse, dtype)
        exact = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.008, "atol": 1e-3}
        forms = [x, x.transpose(0, -2).contiguous().transpose(0, -2) if x.ndim > 1 else x, x[:1].expand_as(x)]
        for form in forms:
            given = (form, cos, sin)
            torch.testing.assert_close(
                kernel.launch_forward(*given, **options), kernel.reference(*given, **options), **exact
            )
            torch.testing.assert_close(
                kernel.launch_backward(*given, **options), kernel.backward_reference(*given, **options), **exact
            )
            assert OP(*given, **options).stride() == torch.empty_like(form).stride()
