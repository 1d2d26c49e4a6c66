from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels import adam_step as kernel
from tests.inductor_ext.kernels.checks import run_interpreted

OP = torch.ops.dsgraph.adam_step_
OPTIONS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "adamw": True, "maximize": False}
SHAPES = [(0,), (1,), (7,), (3, 5), (1025,), (2, 1024)]


def _state(shape: tuple[int, ...], copy: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    param = torch.randn(shape)
    copied = None if copy is None else param.to(copy)
    return param, torch.zeros(shape), torch.zeros(shape), copied


def _grads(shape: tuple[int, ...], steps: int = 5) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape) for _ in range(steps)]


def _run(step_function, shape: tuple[int, ...], copy: torch.dtype | None = None, **changes: object) -> list[Tensor]:
    param, average, squares, copied = _state(shape, copy)
    for number, grad in enumerate(_grads(shape), 1):
        step = torch.tensor(float(number))
        step_function(param, average, squares, grad, copied, step, None, None, **{**OPTIONS, **changes})
    return [item for item in (param, average, squares, copied) if item is not None]


def _torch_run(shape: tuple[int, ...], **changes: object) -> list[Tensor]:
    options = {**OPTIONS, **changes}
    param = torch.nn.Parameter(_state(shape)[0])
    optimizer = (torch.optim.AdamW if options["adamw"] else torch.optim.Adam)(
        [param],
        lr=options["lr"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        maximize=options["maximize"],
        fused=False,
        foreach=False,
    )
    for grad in _grads(shape):
        param.grad = grad
        optimizer.step()
    state = optimizer.state[param]
    return [param.detach(), state["exp_avg"], state["exp_avg_sq"]]


@pytest.mark.covering
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("adamw", "maximize", "decay"), [*itertools.product([True, False], [True, False], [0.0, 0.1])])
def test_it_is_the_step_of_torch_bit_for_bit(shape, adamw, maximize, decay):
    changes = {"adamw": adamw, "maximize": maximize, "weight_decay": decay}
    assert all(map(torch.equal, _run(OP, shape, **changes), _torch_run(shape, **changes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_copy_is_the_rounded_master(dtype):
    param, *_, copied = _run(OP, (3, 5), copy=dtype)
    assert copied.dtype == dtype and torch.equal(copied, param.to(dtype))
    assert torch.equal(param, _run(OP, (3, 5))[0])


def test_low_precision_gradients_are_widened_first():
    (param, average, squares, _), grad = _state((7,)), _grads((7,))[0].bfloat16()
    OP(param, average, squares, grad, None, torch.tensor(1.0), None, None, **OPTIONS)
    plain = _state((7,))
    OP(*plain[:3], grad.float(), None, torch.tensor(1.0), None, None, **OPTIONS)
    assert torch.equal(param, plain[0])


def test_a_scaled_gradient_is_divided_first():
    scaled, plain, grad = _state((7,)), _state((7,)), _grads((7,))[0]
    OP(*scaled[:3], grad * 8, None, torch.tensor(1.0), torch.tensor(8.0), torch.tensor(0.0), **OPTIONS)
    OP(*plain[:3], grad, None, torch.tensor(1.0), None, None, **OPTIONS)
    assert all(map(torch.equal, scaled[:3], plain[:3]))


def test_after_an_overflow_nothing_changes():
    state = _state((7,), torch.bfloat16)
    OP(*state[:3], torch.full((7,), torch.inf), state[3], torch.tensor(1.0), None, torch.tensor(1.0), **OPTIONS)
    assert all(map(torch.equal, state, _state((7,), torch.bfloat16)))


def test_torch_takes_it_for_a_well_formed_op():
    for copy in (None, torch.bfloat16):
        param, average, squares, copied = _state((3, 5), copy)
        args = (param, average, squares, _grads((3, 5))[0], copied, torch.tensor(1.0), None, None)
        torch.library.opcheck(OP.default, args, OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.zeros(5)}, r"exp_avg has shape \[5\] and param \[4, 6\]"),
        ({0: torch.zeros(6, 4).t()}, "param is not contiguous"),
        ({0: torch.zeros(4, 6).bfloat16()}, "param is torch.bfloat16; it takes float32 masters"),
        ({2: torch.zeros(4, 6).double()}, "exp_avg_sq torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    args = {place: torch.zeros(4, 6) for place in range(4)} | change
    with pytest.raises(ValueError, match=message):
        OP(*args.values(), None, torch.tensor(1.0), None, None, **OPTIONS)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "grad", "copy", "step", "grad_scale", "found_inf"])
def test_all_are_on_one_device(name):
    tensors = dict.fromkeys(("param", "exp_avg", "exp_avg_sq", "grad", "copy"), torch.zeros(4, 6))
    numbers = dict.fromkeys(("step", "grad_scale", "found_inf"), torch.tensor(1.0))
    given = tensors | numbers
    assert kernel.why_not(**given) is None
    reason = kernel.why_not(**given | {name: given[name].to("meta")})
    assert reason == f"{name} is on meta and param on cpu; both must be on one device"


@pytest.mark.slow
def test_the_triton_kernel_gives_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, adamw, maximize in itertools.product(SHAPES, (True, False), (True, False)):
        for copy in (None, torch.bfloat16):
            changes = {"adamw": adamw, "maximize": maximize, "beta2": 0.999 if adamw else 0.95}
            ours, plain = (_run(call, shape, copy, **changes) for call in (kernel.launch, kernel.reference))
            torch.testing.assert_close(ours[:3], plain[:3], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(ours[3:], plain[3:], rtol=0.008, atol=1e-6)
    test_after_an_overflow_nothing_changes()
    test_a_scaled_gradient_is_divided_first()
