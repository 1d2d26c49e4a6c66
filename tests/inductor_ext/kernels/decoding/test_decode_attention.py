from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels.decoding import decode_attention as kernel
from dsgraph.inductor_ext.kernels.decoding import decode_attention_cpp
from tests.inductor_ext.kernels.checks import assert_as_near, run_interpreted

OP = torch.ops.dsgraph.decode_attention
# Sequences, heads, heads of keys, positions, filled ones.
SHAPES = [(1, 4, 4, 64, 7), (2, 4, 2, 100, 70), (3, 8, 1, 130, 130), (1, 2, 2, 16, 1)]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype, *, width: int = 16) -> tuple[Tensor, ...]:
    b, heads, groups, s, filled = shape
    torch.manual_seed(0)
    keys, values = (torch.randn(b, groups, s, width).to(dtype) for _ in range(2))
    mask = (torch.arange(s) < filled).expand(b, 1, 1, s).clone()
    mask[0, ..., : filled // 2] = False  # padding on the left
    return torch.randn(b, heads, 1, width).to(dtype), keys, values, mask


@pytest.mark.parametrize("width", [16, 80, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_of_torch_and_the_rest_of_the_cache_is_not_read(shape, dtype, width):
    q, keys, values, mask = _inputs(shape, dtype, width=width)
    plain = kernel.reference(q, keys, values, mask, scale=0.3)
    truth = kernel.reference(q.double(), keys.double(), values.double(), mask, scale=0.3)
    keys[:, :, shape[-1] :] = values[:, :, shape[-1] :] = torch.nan
    found = OP(q, keys, values, mask, scale=0.3)
    if dtype == torch.float32:
        torch.testing.assert_close(found, plain)
    else:
        assert_as_near([found], [plain], [truth])


def test_torch_takes_them_for_well_formed_ops():
    given = _inputs(SHAPES[1], torch.float32)
    torch.library.opcheck(OP.default, given, {"scale": 0.5})
    torch.library.opcheck(decode_attention_cpp.decode_attention_product, (*given, 0.5))
    assert kernel.traceable(*given, scale=0.5) is not NotImplemented
    assert kernel.traceable(*(item if item.dtype == torch.bool else item.half() for item in given), scale=0.5) is (
        NotImplemented
    )


def test_what_it_cannot_take_is_said():
    q, keys, values, mask = _inputs(SHAPES[1], torch.float32)
    assert kernel.supports(q, keys, values, mask) is None
    assert "its mask is torch.float32" in (kernel.supports(q, keys, values, mask.float()) or "")
    assert "has 100 positions" in (kernel.supports(q, keys, values, mask[..., :9]) or "")
    assert "its keys are" in (kernel.supports(q[:, :3], keys, values, mask) or "")


@pytest.mark.slow
def test_the_triton_kernel_gives_the_same():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    """Runs in a process of its own."""
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        given = _inputs(shape, dtype)
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
        plain = kernel.reference(*given, scale=0.3)
        given[1][:, :, shape[-1] :] = given[2][:, :, shape[-1] :] = torch.nan
        torch.testing.assert_close(kernel.launch(*given, scale=0.3), plain, **near)
