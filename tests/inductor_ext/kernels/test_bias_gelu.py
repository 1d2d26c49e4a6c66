from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.inductor_ext.kernels import bias_gelu as kernel
from tests.inductor_ext.kernels.checks import assert_as_near, gradients, run_interpreted, saved_bytes

OP = torch.ops.dsgraph.bias_gelu
SHAPES = [(7,), (1, 1), (3, 7), (2, 5, 16), (0, 4), (1, 2, 3, 1029)]
WAYS = ["none", "tanh"]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(size).mul(2).to(dtype).requires_grad_() for size in (shape, shape[-1:]))


def _plain(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


@pytest.mark.parametrize("approximate", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_plain_torch(shape, approximate):
    inputs = _inputs(shape, torch.float32)
    y, plain = OP(*inputs, approximate=approximate, dtype=torch.float32), _plain(*inputs, approximate)
    assert torch.equal(y, plain)
    torch.testing.assert_close(gradients(y, inputs), gradients(plain, inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("approximate", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_float32_as_plain_torch(dtype, approximate):
    low = _inputs((64, 64), dtype)
    wide = tuple(item.detach().float().requires_grad_() for item in low)
    ours = OP(*low, approximate=approximate, dtype=dtype)
    plain, truth = _plain(*low, approximate), _plain(*wide, approximate)
    assert_as_near([ours, *gradients(ours, low)], [plain, *gradients(plain, low)], [truth, *gradients(truth, wide)])


@pytest.mark.parametrize("approximate", WAYS)
def test_gradients_are_derivatives(approximate):
    def function(x: Tensor, bias: Tensor) -> Tensor:
        return OP(x, bias, approximate=approximate, dtype=torch.float64)

    assert torch.autograd.gradcheck(function, _inputs((3, 5), torch.float64))


def test_torch_takes_it_for_a_well_formed_op():
    inputs = _inputs((3, 5), torch.float32)
    torch.library.opcheck(OP.default, inputs, {"approximate": "tanh", "dtype": torch.float32})
    given = (torch.ones(3, 5), *map(Tensor.detach, inputs))
    torch.library.opcheck(torch.ops.dsgraph.bias_gelu_backward.default, given, {"approximate": "tanh"})


def test_what_is_saved_is_as_large_as_the_sum():
    x, bias = _inputs((16, 64), torch.bfloat16)
    ours = saved_bytes(lambda x, bias: OP(x, bias, approximate="none", dtype=torch.bfloat16), x, bias)
    assert ours == saved_bytes(_plain, x, bias) + bias.nbytes  # and the bias, which is there anyway


@pytest.mark.slow
def test_the_triton_kernels_give_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, approximate in itertools.product(SHAPES, (torch.float32, torch.bfloat16), WAYS):
        x, bias = (item.detach() for item in _inputs(shape, dtype))
        if x.numel() == 0:
            assert OP(x, bias, approximate=approximate, dtype=dtype).shape == shape
            continue
        x = torch.cat((x, x), -1)[..., : shape[-1]]  # rows with a gap between them
        exact = {"rtol": 1e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 0.008, "atol": 1e-3}
        y = kernel.launch_forward(x, bias, approximate=approximate, dtype=dtype)
        torch.testing.assert_close(y, kernel.reference(x, bias, approximate=approximate, dtype=dtype), **exact)
        given = (torch.randn_like(y), x, bias)
        ours = kernel.launch_backward(*given, approximate=approximate)
        # in float32 ATen's derivative of the tanh is 2e-6 off
        truth = kernel.backward_reference(*(item.double() for item in given), approximate=approximate)
        torch.testing.assert_close(ours, tuple(item.to(dtype) for item in truth), **exact)


@pytest.mark.inductor
def test_inductor_fuses_it_with_its_neighbours():
    from torch._inductor.utils import run_and_get_code

    def step(x: Tensor, bias: Tensor) -> Tensor:
        return OP(x * 2, bias, approximate="tanh", dtype=torch.float32).sin()

    inputs = tuple(item.detach() for item in _inputs((4, 64), torch.float32))
    torch._dynamo.reset()
    result, (code, *_) = run_and_get_code(torch.compile(step, backend="dsgraph"), *inputs)
    assert "dsgraph.bias_gelu" not in code
    torch.testing.assert_close(result, step(*inputs), rtol=1e-5, atol=1e-5)
