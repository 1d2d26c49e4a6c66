from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels import add_rms_norm as kernel
from dsgraph.inductor_ext.kernels import rms_norm
from tests.inductor_ext.kernels.checks import assert_as_near, run_interpreted, saved_bytes

OP = torch.ops.dsgraph.add_rms_norm
EPS = 1e-6
SHAPES = [(7,), (1, 1), (3, 7), (2, 5, 16), (4, 33), (1, 2, 3, 129)]
READ = ["y", "total", "both"]  # what of the results has a gradient
_Inputs = tuple[Tensor, Tensor, Tensor | None]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, *, with_weight: bool = True) -> _Inputs:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    return x, residual, torch.randn(shape[-1]).to(dtype).requires_grad_() if with_weight else None


def _options(dtype: torch.dtype, *, offset: float = 0.0, early: bool = True) -> dict:
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    return {"offset": offset, "norm_dtype": dtype if early else statistics, "dtype": dtype}


def _plain(x: Tensor, residual: Tensor, weight: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm.reference(total, weight, EPS, **options)[0], total


def _gradients(results: tuple[Tensor, Tensor], inputs: _Inputs, read: str = "both") -> list[Tensor]:
    weights = torch.randn(2, *results[0].shape, generator=torch.Generator().manual_seed(1))
    products = [result.float() * weight for result, weight in zip(results, weights, strict=True)]
    loss = {"y": products[0], "total": products[1], "both": products[0] + products[1]}[read].sum()
    given = [item for item in inputs if item is not None]
    return list(torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_weight", [True, False])
def test_values_and_gradients_are_those_of_plain_torch(shape, offset, with_weight):
    inputs, options = _inputs(shape, torch.float32, with_weight=with_weight), _options(torch.float32, offset=offset)
    ours, plain = OP(*inputs, EPS, **options)[:2], _plain(*inputs, **options)
    assert all(map(torch.equal, ours, plain))
    for read in READ:
        ours, plain = (_gradients(results, inputs, read) for results in _both(inputs, options))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def _both(inputs: _Inputs, options: dict) -> list[tuple[Tensor, Tensor]]:
    return [OP(*inputs, EPS, **options)[:2], _plain(*inputs, **options)]


@pytest.mark.parametrize(("early", "offset"), [(True, 0.0), (True, 1.0), (False, 0.0), (False, 1.0)])
def test_low_precision_is_as_near_to_float32_as_plain_torch(early, offset):
    low = _inputs((8, 64), torch.bfloat16)
    wide = tuple(item.detach().float().requires_grad_() for item in low)
    ours, plain = _both(low, _options(torch.bfloat16, early=early, offset=offset))
    truth = _plain(*wide, **_options(torch.float32, offset=offset))
    assert torch.equal(ours[1], plain[1]) and torch.equal(ours[0], plain[0])
    assert_as_near(_gradients(ours, low), _gradients(plain, low), _gradients(truth, wide))


@pytest.mark.parametrize("read", READ)
def test_gradients_are_derivatives(read):
    inputs, options = _inputs((3, 5), torch.float64), _options(torch.float64, offset=1.0)
    chosen = {"y": slice(0, 1), "total": slice(1, 2), "both": slice(0, 2)}[read]
    assert torch.autograd.gradcheck(lambda *given: OP(*given, EPS, **options)[chosen], inputs)


def test_what_is_added_to_itself_gets_both_gradients():
    x, _, weight = _inputs((3, 5), torch.float64)
    assert torch.autograd.gradcheck(lambda x, w: OP(x, x, w, EPS, **_options(torch.float64))[:2], (x, weight))


def test_torch_takes_it_for_a_well_formed_op():
    for with_weight in (True, False):
        inputs = _inputs((3, 5), torch.float32, with_weight=with_weight)
        torch.library.opcheck(OP.default, (*inputs, EPS), _options(torch.float32))
        total, _, weight = (item if item is None else item.detach() for item in inputs)
        grad, rstd = torch.ones(3, 5), torch.ones(3, 1)
        options = {"offset": 0.0, "norm_dtype": torch.float32}
        for grad_total in (None, grad):
            given = (grad, grad_total, total, weight, rstd)
            torch.library.opcheck(torch.ops.dsgraph.add_rms_norm_backward.default, given, options)


def test_no_more_is_saved_than_by_plain_torch():
    inputs = _inputs((16, 64), torch.bfloat16)
    ours = saved_bytes(lambda *given: OP(*given, EPS, **_options(torch.bfloat16))[0], *inputs)
    assert ours == 16 * 64 * 2 + 64 * 2 + 16 * 4  # total, weight and rstd


def test_no_zeros_are_made_for_what_nobody_reads():
    inputs, options = _inputs((3, 5), torch.float32), _options(torch.float32)
    y, total, _ = OP(*inputs, EPS, **options)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True)
        torch.autograd.grad(total, inputs[:2], torch.ones_like(total))
    seen = [event.key for event in profile.key_averages() for _ in range(event.count)]
    assert seen.count("dsgraph::add_rms_norm_backward") == 1 and not any("zeros" in name for name in seen)


@pytest.mark.parametrize(
    ("residual", "reason"),
    [
        (torch.zeros(3, 5, dtype=torch.bfloat16), "the sum of torch.float32 and torch.bfloat16"),
        (torch.zeros(5), r"the sum of [3, 5] and [5]"),
    ],
)
def test_what_it_cannot_add_it_says(residual, reason):
    assert reason in kernel.supports(torch.zeros(3, 5), residual, None, EPS)
    assert kernel.supports(torch.zeros(3, 5), torch.zeros(3, 5), None, EPS) is None


@pytest.mark.slow
def test_the_triton_kernels_give_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, offset in itertools.product(SHAPES, (torch.float32, torch.float16), (0.0, 1.0)):
        for with_weight in (True, False):
            given = _inputs(shape, dtype, with_weight=with_weight)
            x, residual, weight = (item if item is None else item.detach() for item in given)
            residual = torch.cat((residual, residual), -1)[..., : shape[-1]]  # rows with a gap between them
            options = _options(dtype, offset=offset)
            y, total, rstd = kernel.launch_forward(x, residual, weight, EPS, **options)
            plain = kernel.reference(x, residual, weight, EPS, **options)
            exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.002, "atol": 0.002}
            assert torch.equal(total, plain[1])
            torch.testing.assert_close((y, total, rstd), plain, **exact)
            for grad_total in (None, torch.cat((x, x), -1)[..., : shape[-1]]):
                grads = (torch.randn_like(x), grad_total)
                keep = {"offset": offset, "norm_dtype": options["norm_dtype"]}
                ours = kernel.launch_backward(*grads, total, weight, rstd, **keep)
                theirs = kernel.backward_reference(*grads, total, weight, rstd, **keep)
                torch.testing.assert_close(ours, theirs, **exact)


@pytest.mark.inductor
def test_inductor_fuses_it_with_its_neighbours():
    from torch._inductor.utils import run_and_get_code

    def step(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, total, _ = OP(x * 2, residual, weight, EPS, **_options(torch.float32))
        return y.sin(), total

    inputs = _inputs((4, 64), torch.float32)
    torch._dynamo.reset()
    results, codes = run_and_get_code(
        lambda *given: _run(torch.compile(step, backend="dsgraph", fullgraph=True), given), *inputs
    )
    assert len(codes) == 2 and not any("dsgraph.add_rms_norm" in code for code in codes)
    torch.testing.assert_close(results, _run(step, inputs), rtol=1e-5, atol=1e-5)


def _run(step, inputs: _Inputs) -> list[Tensor]:
    results = step(*inputs)
    return [*results, *_gradients(results, inputs)]
