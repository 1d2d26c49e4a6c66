"""Ops of decoding and of compression: quantized weights, one query's attention, signs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dsgraph
from dsgraph.inductor_ext.kernels.decoding import decode_attention, skinny_groups
from dsgraph.inductor_ext.quant import weights
from tests.gpu.device import error_of, host_waits

pytestmark = pytest.mark.gpu

OPS: Any = torch.ops.dsgraph
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXACT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

assert dsgraph.partition  # registers the ops


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_skinny_products(dtype, rows, device, record):
    weight = torch.randn(390, 512, device=device)
    x, bias = torch.randn(rows, 512, device=device).to(dtype), torch.randn(390, device=device).to(dtype)
    int8, scale = weights.quantize_rows(weight)
    int4 = weights.quantize_groups(weight, group=32)
    cases = {
        "plain": (
            lambda: OPS.skinny_linear(x, weight.to(dtype), bias, None),
            x.double() @ weight.to(dtype).double().t() + bias.double(),
        ),
        "int8": (
            lambda: OPS.skinny_linear(x, int8, bias, scale),
            x.double() @ (int8.double() * scale.double()[:, None]).t() + bias.double(),
        ),
        "int4": (lambda: OPS.skinny_groups(x, *int4), x.double() @ weights.dequantize_groups(*int4).double().t()),
    }
    found = {name: error_of(op(), truth) for name, (op, truth) in cases.items()}
    record(errors=found, reference_int4=error_of(skinny_groups.reference(x, *int4), cases["int4"][1]))
    assert max(found.values()) < EXACT[dtype], found
    for name, (op, _) in cases.items():
        assert host_waits(op) == {}, name


@pytest.mark.parametrize("positions", [256, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_attention(dtype, positions, device, record):
    q = torch.randn(2, 8, 1, 64, device=device).to(dtype)
    keys, values = (torch.randn(2, 2, positions, 64, device=device).to(dtype) for _ in range(2))
    filled = torch.tensor([[77], [130]], device=device)
    mask = (torch.arange(positions, device=device) < filled)[:, None, None]
    wide = [tensor.double() for tensor in (q, keys, values)]
    truth = decode_attention.reference(*wide, mask, scale=0.125)

    def op() -> torch.Tensor:
        return OPS.decode_attention(q, keys, values, mask, scale=0.125)

    found = error_of(op(), truth)
    record(error=found)
    assert found < EXACT[dtype]
    assert host_waits(op) == {}


def test_signs_are_those_of_the_cpu(device):
    x = torch.randn(8, 1003)
    x[-1, -5:] = 0  # padding
    expected, got = OPS.pack_signs(x, 8 * 1003 - 5), OPS.pack_signs(x.to(device), 8 * 1003 - 5)
    assert torch.equal(got.cpu()[:, 4:], expected[:, 4:]), "signs"
    scales = [packed.cpu()[:, :4].contiguous().view(torch.float32) for packed in (got, expected)]
    torch.testing.assert_close(*scales)
    torch.testing.assert_close(OPS.unpack_signs(got, 1003).cpu(), OPS.unpack_signs(expected, 1003))


def test_compressed_momentum_is_that_of_the_cpu(device):
    inputs = [torch.randn(64, 16), torch.randn(64, 16), torch.randn(1024), torch.tensor([0.9, 0.1])]
    expected, got = (OPS.compress_momentum(*(t.to(where) for t in inputs), 8) for where in ("cpu", device))
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if mine.dtype is not torch.uint8:
            torch.testing.assert_close(mine.cpu(), theirs, msg=lambda text, n=number: f"result {n}: {text}")


@pytest.mark.cuda
def test_signs_are_packed_without_waiting_for_the_device(device):
    x = torch.randn(8, 1003, device=device)
    packed = OPS.pack_signs(x, 8000)
    OPS.unpack_signs(packed, 1003)  # compiles
    assert host_waits(lambda: OPS.unpack_signs(OPS.pack_signs(x, 8000), 1003)) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["symmetric", "groups, stochastic"])
def test_fake_quantize_is_that_of_the_cpu(how, dtype, device):
    options = {"groups": 0, "symmetric": True, "stochastic": False}
    if how != "symmetric":
        options = {"groups": 64, "symmetric": False, "stochastic": True}
    weight, control = torch.randn(64, 128).to(dtype), torch.tensor([127.0, 0.0, 1234.0])
    expected, got = (
        OPS.fake_quantize(weight.to(where), control.to(where), transposed=False, **options) for where in ("cpu", device)
    )
    step = (weight.max() - weight.min()).float() / 127
    off = (got.cpu().float() - expected.float()).abs()
    assert (off > 1e-5).float().mean() < 1e-3, "more than a few numbers were rounded the other way"
    assert off.max() <= 1.01 * step + torch.finfo(dtype).eps * 4
