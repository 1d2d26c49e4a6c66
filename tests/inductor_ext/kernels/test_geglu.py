from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.inductor_ext.kernels import geglu as kernel
from tests.inductor_ext.kernels.checks import gradients, run_interpreted, saved_bytes

OP = torch.ops.dsgraph.geglu
SHAPES = [(), (1,), (3, 7), (2, 5, 16), (0, 4), (1, 2, 3, 1029)]
WAYS = [{"approximate": "none"}, {"approximate": "tanh"}]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape).mul(3).to(dtype).requires_grad_() for _ in range(2))


def plain(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def test_mixed_dtypes_and_the_result_in_another():
    gate, up = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(3, 8, requires_grad=True)
    y = OP(gate, up, approximate="none", dtype=torch.float16)
    assert torch.equal(y, (F.gelu(gate.float()) * up).half())
    assert [item.dtype for item in gradients(y, (gate, up))] == [torch.bfloat16, torch.float32]


def test_halves_of_one_tensor_are_not_copied_and_nothing_else_is_saved():
    x = torch.randn(4, 32, requires_grad=True)
    gate, up = x.chunk(2, -1)
    assert torch.equal(OP(gate, up, approximate="none", dtype=torch.float32), plain(gate, up))
    ours = saved_bytes(lambda x: OP(*x.chunk(2, -1), approximate="none", dtype=torch.float32), x)
    assert ours == x.nbytes < saved_bytes(lambda x: plain(*x.chunk(2, -1)), x)


def test_integers_are_refused():
    assert kernel.supports(torch.ones(3), torch.ones(3, dtype=torch.int64)) == "its other half is torch.int64"


@pytest.mark.slow
def test_the_triton_kernels_give_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, way in itertools.product(SHAPES, (torch.float32, torch.bfloat16), WAYS):
        wide = torch.randn((*shape[:-1], 2 * shape[-1]) if shape else (), dtype=dtype)
        gate, up = wide.chunk(2, -1) if shape else (wide, wide)
        if gate.numel() == 0:
            assert OP(gate, up, **way, dtype=dtype).shape == shape
            continue
        exact = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.008, "atol": 0.0}
        y = kernel.launch_forward(gate, up, **way, dtype=dtype)
        torch.testing.assert_close(y, kernel.reference(gate, up, **way, dtype=dtype), **exact)
        grad = torch.randn_like(y)
        ours = kernel.launch_backward(grad, gate, up, **way)
        theirs = kernel.backward_reference(grad, gate, up, **way)
        torch.testing.assert_close(ours, theirs, **exact)
