from __future__ import annotations

import pytest
import triton
import triton.language as tl

from dsgraph.passes.analysis.hardware import GPUS

from .compiling import compile_triton

pytestmark = pytest.mark.inductor


@triton.jit
def _double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def _product(a, b, c, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None] * BLOCK, tl.arange(0, BLOCK)[None, :]
    tl.store(c + row + column, tl.dot(tl.load(a + row + column), tl.load(b + row + column)))


@triton.jit
def _normalise(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(y + at, values / tl.sum(values))


@pytest.mark.parametrize("arch", GPUS)
def test_what_a_kernel_takes(arch):
    small = compile_triton(_double, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BLOCK": 1024}, arch)
    assert 8 <= small.registers <= 64
    assert (small.shared_bytes, small.stack_bytes, small.spill_bytes) == (0, 0, 0)
    pointers = dict.fromkeys(("a", "b"), "*bf16") | {"c": "*fp32"}
    product = compile_triton(_product, pointers, {"BLOCK": 64}, arch)
    assert product.shared_bytes >= 2 * 64 * 64  # at least an operand lies in shared memory
    assert product.registers > small.registers


def test_spills_are_seen():
    types = {"x": "*fp32", "y": "*fp32"}
    one_warp = compile_triton(_normalise, types, {"BLOCK": 16384}, "sm_80", num_warps=1)  # 512 values a thread
    assert one_warp.spill_bytes >= 4 * (512 - 255)
    assert one_warp.stack_bytes >= 4 * (512 - 255)
    assert compile_triton(_normalise, types, {"BLOCK": 16384}, "sm_80", num_warps=16).spill_bytes == 0


def test_no_driver_is_left_behind():
    before = triton.runtime.driver._active
    compile_triton(_double, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BLOCK": 128}, "sm_80")
    assert triton.runtime.driver._active is before
