from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.inductor_ext.kernels import geglu as kernel
from tests.inductor_ext.kernels.checks import assert_as_near, gradients, run_interpreted, saved_bytes

OP = torch.ops.dsgraph.geglu
SHAPES = [(), (1,), (3, 7), (2, 5, 16), (0, 4), (1, 2, 3, 1029)]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape).mul(3).to(dtype).requires_grad_() for _ in range(2))


def _plain(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_plain_torch(shape, approximate):
    inputs = _inputs(shape, torch.float32)
    y, plain = OP(*inputs, approximate=approximate, dtype=torch.float32), _plain(*inputs, approximate)
    assert torch.equal(y, plain)
    torch.testing.assert_close(gradients(y, inputs), gradients(plain, inputs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_float32_as_plain_torch(dtype, approximate):
    low = _inputs((16, 64), dtype)
    wide = tuple(item.detach().float().requires_grad_() for item in low)
    ours = OP(*low, approximate=approximate, dtype=dtype)
    plain, truth = _plain(*low, approximate), _plain(*wide, approximate)
    assert_as_near([ours, *gradients(ours, low)], [plain, *gradients(plain, low)], [truth, *gradients(truth, wide)])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gradients_are_derivatives(approximate):
    def function(gate: Tensor, up: Tensor) -> Tensor:
        return OP(gate, up, approximate=approximate, dtype=torch.float64)

    assert torch.autograd.gradcheck(function, _inputs((3, 5), torch.float64))


def test_torch_takes_it_for_a_well_formed_op():
    inputs = _inputs((3, 5), torch.float32)
    torch.library.opcheck(OP.default, inputs, {"approximate": "tanh", "dtype": torch.float32})
    given = (torch.ones(3, 5), *map(Tensor.detach, inputs))
    torch.library.opcheck(torch.ops.dsgraph.geglu_backward.default, given, {"approximate": "tanh"})


def test_mixed_dtypes_and_the_result_in_another():
    gate, up = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(3, 8, requires_grad=True)
    y = OP(gate, up, approximate="none", dtype=torch.float16)
    assert torch.equal(y, (F.gelu(gate.float()) * up).half())
    assert [item.dtype for item in gradients(y, (gate, up))] == [torch.bfloat16, torch.float32]


def test_halves_of_one_tensor_are_not_copied_and_nothing_else_is_saved():
    x = torch.randn(4, 32, requires_grad=True)
    gate, up = x.chunk(2, -1)
    assert torch.equal(OP(gate, up, approximate="none", dtype=torch.float32), _plain(gate, up))
    ours = saved_bytes(lambda x: OP(*x.chunk(2, -1), approximate="none", dtype=torch.float32), x)
    assert ours == x.nbytes < saved_bytes(lambda x: _plain(*x.chunk(2, -1)), x)


def test_integers_are_refused():
    assert kernel.supports(torch.ones(3), torch.ones(3, dtype=torch.int64)) == "its other half is torch.int64"


@pytest.mark.slow
def test_the_triton_kernels_give_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, approximate in itertools.product(SHAPES, (torch.float32, torch.bfloat16), ("none", "tanh")):
        wide = torch.randn((*shape[:-1], 2 * shape[-1]) if shape else (), dtype=dtype)
        gate, up = wide.chunk(2, -1) if shape else (wide, wide)
        if gate.numel() == 0:
            assert OP(gate, up, approximate=approximate, dtype=dtype).shape == shape
            continue
        exact = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.008, "atol": 0.0}
        y = kernel.launch_forward(gate, up, approximate=approximate, dtype=dtype)
        torch.testing.assert_close(y, kernel.reference(gate, up, approximate=approximate, dtype=dtype), **exact)
        grad = torch.randn_like(y)
        ours = kernel.launch_backward(grad, gate, up, approximate=approximate)
        theirs = kernel.backward_reference(grad, gate, up, approximate=approximate)
        torch.testing.assert_close(ours, theirs, **exact)


@pytest.mark.inductor
def test_inductor_fuses_it_with_its_neighbours():
    from torch._inductor.utils import run_and_get_code

    def step(gate: Tensor, up: Tensor) -> Tensor:
        return OP(gate * 2, up, approximate="tanh", dtype=torch.float32).sin()

    inputs = tuple(item.detach() for item in _inputs((4, 64), torch.float32))
    torch._dynamo.reset()
    result, (code, *_) = run_and_get_code(torch.compile(step, backend="dsgraph"), *inputs)
    assert "dsgraph.geglu" not in code
    torch.testing.assert_close(result, step(*inputs), rtol=1e-5, atol=1e-5)
