from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsgraph.inductor_ext.kernels import bias_gelu as kernel
from tests.inductor_ext.kernels.checks import run_interpreted, saved_bytes

OP = torch.ops.dsgraph.bias_gelu
SHAPES = [(7,), (1, 1), (3, 7), (2, 5, 16), (0, 4), (1, 2, 3, 1029)]
WAYS = [{"approximate": "none"}, {"approximate": "tanh"}]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(size).mul(2).to(dtype).requires_grad_() for size in (shape, shape[-1:]))


def plain(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def test_what_is_saved_is_as_large_as_the_sum():
    x, bias = inputs((16, 64), torch.bfloat16)
    ours = saved_bytes(lambda x, bias: OP(x, bias, approximate="none", dtype=torch.bfloat16), x, bias)
    assert ours == saved_bytes(plain, x, bias) + bias.nbytes  # and the bias, which is there anyway


@pytest.mark.slow
def test_the_triton_kernels_give_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype, way in itertools.product(SHAPES, (torch.float32, torch.bfloat16), WAYS):
        x, bias = (item.detach() for item in inputs(shape, dtype))
        if x.numel() == 0:
            assert OP(x, bias, **way, dtype=dtype).shape == shape
            continue
        x = torch.cat((x, x), -1)[..., : shape[-1]]  # rows with a gap between them
        exact = {"rtol": 1e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 0.008, "atol": 1e-3}
        y = kernel.launch_forward(x, bias, **way, dtype=dtype)
        torch.testing.assert_close(y, kernel.reference(x, bias, **way, dtype=dtype), **exact)
        given = (torch.randn_like(y), x, bias)
        ours = kernel.launch_backward(*given, **way)
        # in float32 ATen's derivative of the tanh is 2e-6 off
        truth = kernel.backward_reference(*(item.double() for item in given), **way)
        torch.testing.assert_close(ours, tuple(item.to(dtype) for item in truth), **exact)
