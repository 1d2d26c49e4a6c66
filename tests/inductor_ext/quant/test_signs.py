"""Signs and scales: eight to a byte, odd sizes, padding, and what comes back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsgraph.inductor_ext.quant.signs import (
    launch_pack,
    launch_unpack,
    pack_signs,
    packed_bytes,
    reference,
    unpack_reference,
    unpack_signs,
)
from tests.inductor_ext.kernels.checks import run_interpreted


@given(st.integers(1, 4), st.integers(0, 40), st.integers(0, 40), st.integers(0, 10**6))
def test_signs_and_scales_come_back(rows, n, missing, seed):
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))
    count = max(rows * n - missing, 0)
    x.view(-1)[count:] = 0
    packed = pack_signs(x, count)
    assert packed.shape == (rows, packed_bytes(n)) and packed.dtype == torch.uint8
    assert torch.equal(packed, reference(x, count))
    found = unpack_signs(packed, n)
    assert torch.equal(found, unpack_reference(packed, n))
    for row in range(rows):
        there = x[row, : max(count - row * n, 0)]
        back = found[row, : there.numel()]
        assert torch.equal(torch.signbit(back), torch.signbit(there))
        torch.testing.assert_close(back.norm(), there.norm())  # as long as what was packed


def test_bytes_written_out():
    x = torch.tensor([[-1.0, 2.0, 3.0, -4.0, 0.0, -0.0, 1.0, 1.0, -1.0]])
    scale = torch.frombuffer(bytearray(pack_signs(x, 9)[0, :4].tolist()), dtype=torch.float32)
    assert scale.item() == pytest.approx(math.sqrt(33 / 9))
    assert pack_signs(x, 9)[0, 4:].tolist() == [0b00101001, 0b00000001]
    assert unpack_signs(pack_signs(x, 9), 9).sign().tolist() == [[-1, 1, 1, -1, 1, -1, 1, 1, -1]]


def test_blocks_of_many_numbers():
    x = torch.randn(2, 2**18 + 11)
    assert torch.equal(pack_signs(x, x.numel()), reference(x, x.numel()))


def test_what_is_not_finite_is_told():
    x = torch.tensor([[1.0, float("inf"), 2.0]])
    assert not unpack_signs(pack_signs(x, 3), 3).isfinite().any()


@pytest.mark.slow
def test_triton_packs_alike():
    run_interpreted(__name__, "interpreted")


def interpreted() -> None:
    for rows, n, count in ((1, 1, 1), (2, 17, 30), (3, 2100, 6300)):
        x = torch.randn(rows, n)
        x.view(-1)[count:] = 0
        packed = launch_pack(x, count)
        assert torch.equal(packed, reference(x, count)), (rows, n)
        assert torch.equal(launch_unpack(packed, n), unpack_reference(packed, n))
