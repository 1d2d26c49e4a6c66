"""Signs of numbers, eight to a byte, with one scale a row, for the compressed reduction.

For x `[rows, n]`, of which the first `count` numbers, row by row, are valid and the others are padding:

    scale_r  = sqrt(mean of x^2 over the valid numbers of row r)       0 if there are none; in float64
    sign_i   = -1 where the sign bit of x_i is set (of -0.0 it is), 1 elsewhere
    result_r = the four bytes of scale_r as float32, then bit i % 8 of byte i / 8: set where sign_i is -1

`unpack_signs` returns scale_r * sign_i, which has the norm of the valid numbers. The scale is that of Tang et al.:
1-bit Adam, arXiv 2102.02888: the norm of the compressed vector over the norm of its signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dsgraph.inductor_ext.kernels.launch import on_device_of, takes_triton, tl, triton
from dsgraph.inductor_ext.ops import define_op

from . import signs_cpp

SCALE_BYTES = 4
# Eight bytes of 0 or 1, least significant first, times this: the top byte has the eight as bits, the first lowest.
_GATHER_BITS = 0x0102040810204080
_BLOCK = 1024
_CPU_BLOCK = 2**18


def packed_bytes(count: int) -> int:
    """Return the bytes of a row of `count` numbers, its scale included."""
    return SCALE_BYTES + -(-count // 8)


def reference(x: Tensor, count: int) -> Tensor:
    """Compute `pack_signs` in plain torch."""
    rows, n = x.shape
    counts = [min(max(count - row * n, 0), n) for row in range(rows)]
    scales = torch.stack([scale_of(x[row, :there]) for row, there in enumerate(counts)])
    bits = torch.nn.functional.pad(torch.signbit(x), (0, -n % 8)).view(rows, -1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    signs = (bits * weights).sum(-1, dtype=torch.uint8)
    return torch.cat([scales.unsqueeze(1).view(torch.uint8), signs], 1)


def scale_of(numbers: Tensor) -> Tensor:
    """Return the scale of `[n]`: a number on its device, 0 if n is 0.

    Squares are summed in float64, so that the order of their sum, which threads change, does not change the scale.
    """
    return (torch.linalg.vector_norm(numbers.double()) / math.sqrt(max(numbers.numel(), 1))).float()


def unpack_reference(packed: Tensor, n: int) -> Tensor:
    """Compute `unpack_signs` in plain torch."""
    scale, signs = _parts(packed)
    bits = (signs.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return torch.where(bits.flatten(1)[:, :n].bool(), -scale, scale)


def _parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales `[rows, 1]` and signs `[rows, bytes]`."""
    scale = packed[:, :SCALE_BYTES].clone(memory_format=torch.contiguous_format)
    return scale.view(torch.float32), packed[:, SCALE_BYTES:]


class Blocks:
    """Signs on the CPU, in blocks that stay in its cache. Memory is allocated once for all of them.

    Attributes:
        size: Number of elements of a block.
        spare: `[size]` of float32, scratch memory for a block.
    """

    def __init__(self, most: int) -> None:
        """Create blocks for tensors of at most `most` elements."""
        self.size = min(_CPU_BLOCK, most + -most % 8)
        self.spare = torch.empty(self.size)
        self._bits = torch.empty(self.size, dtype=torch.bool)

    def parts(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield the beginning and end of each block of `count` elements."""
        return ((start, min(start + self.size, count)) for start in range(0, count, self.size))

    def pack(self, x: Tensor, result: Tensor, *, leaves_rest: bool) -> None:
        """Pack one row.

        Args:
            x: `[n]`, its valid numbers.
            result: `[4 + ceil(n / 8) or more]` of uint8, zeros.
            leaves_rest: True if x is replaced by its error: itself less its unpacked signs.
        """
        scale = scale_of(x)
        result[:SCALE_BYTES] = scale.view(1).view(torch.uint8)
        signs = result[SCALE_BYTES:]
        for start, end in self.parts(x.numel()):
            block, bits = x[start:end], self._bits[: end - start + -(end - start) % 8]
            bits[end - start :] = False
            torch.signbit(block, out=bits[: end - start])
            bits.view(torch.int64).mul_(_GATHER_BITS).bitwise_right_shift_(56)
            signs[start // 8 : -(-end // 8)] = bits.view(torch.uint8)[::8]
            if leaves_rest:
                block.sub_(torch.copysign(scale, block, out=self.spare[: end - start]))


def _pack_on_cpu(x: Tensor, count: int) -> Tensor:
    rows, n = x.shape
    result, blocks = torch.zeros((rows, packed_bytes(n)), dtype=torch.uint8), Blocks(n)
    for row in range(rows):
        blocks.pack(x[row, : min(max(count - row * n, 0), n)], result[row], leaves_rest=False)
    return result


def tables(packed: Tensor) -> list[Tensor]:
    """Return for each row, `[256, 8]`: the eight numbers that a byte of its signs represents."""
    scale, _ = _parts(packed)
    byte = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    signs = 1 - 2 * ((byte >> torch.arange(8, dtype=torch.uint8)) & 1).float()
    return [signs * own for own in scale]


def _unpack_on_cpu(packed: Tensor, n: int) -> Tensor:
    full = torch.empty((len(packed), packed.shape[1] - SCALE_BYTES, 8))
    for row, table, eights in zip(packed, tables(packed), full, strict=True):
        torch.index_select(table, 0, row[SCALE_BYTES:].int(), out=eights)
    return full.flatten(1)[:, :n].contiguous()


@triton.jit
def pack_kernel(  # type: ignore[no-untyped-def]
    x_ptr, signs_ptr, n, row_bytes, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack one block of bytes of a row in each program."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    byte = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    number = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + row * n + number, mask=number < n, other=0.0)
    bits = (x.to(tl.int32, bitcast=True) < 0).to(tl.int32) << tl.arange(0, 8)[None, :]
    tl.store(signs_ptr + row * row_bytes + 4 + byte, tl.sum(bits, 1).to(tl.uint8), mask=byte * 8 < n)


@triton.jit
def unpack_kernel(  # type: ignore[no-untyped-def]
    signs_ptr, scale_ptr, result_ptr, n, row_bytes, blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Unpack one block of numbers of a row in each program."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    number = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = number < n
    byte = tl.load(signs_ptr + row * row_bytes + 4 + number // 8, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + row)
    sign = 1.0 - 2.0 * ((byte >> (number % 8)) & 1).to(tl.float32)
    tl.store(result_ptr + row * n + number, scale * sign, mask=inside)


def launch_pack(x: Tensor, count: int) -> Tensor:
    """Compute `reference` by the Triton kernel."""
    (rows, n), x = x.shape, x.contiguous()
    result = x.new_empty((rows, packed_bytes(n)), dtype=torch.uint8)
    before = torch.arange(rows, device=x.device) * n  # made on the device, so that the host does not wait for it
    roots = (count - before).clamp(1, n).double().sqrt()
    lengths = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)  # padding is zeros, and adds nothing
    scales = (lengths / roots).float()
    result[:, :SCALE_BYTES] = scales.unsqueeze(1).view(torch.uint8)
    blocks = -(-n // (8 * _BLOCK))
    with on_device_of(x):
        pack_kernel[(rows * blocks,)](x, result, n, packed_bytes(n), blocks, BLOCK=_BLOCK)
    return result


def launch_unpack(packed: Tensor, n: int) -> Tensor:
    """Compute `unpack_reference` by the Triton kernel."""
    packed = packed.contiguous()
    scale, _ = _parts(packed)
    result = packed.new_empty((len(packed), n), dtype=torch.float32)
    blocks = -(-n // _BLOCK)
    with on_device_of(packed):
        unpack_kernel[(len(packed) * blocks,)](packed, scale, result, n, packed.shape[1], blocks, BLOCK=_BLOCK)
    return result


@define_op(fake=lambda x, count: x.new_empty((x.shape[0], packed_bytes(x.shape[1])), dtype=torch.uint8))
def pack_signs(x: Tensor, count: int) -> Tensor:
    """Pack the signs of `x` and the scale of each row.

    Args:
        x: `[rows, n]` of float32, contiguous; padding is 0.
        count: Number of elements that are no padding.

    Returns:
        `[rows, 4 + ceil(n / 8)]` of uint8.
    """
    if takes_triton(x):
        return launch_pack(x, count)
    return _pack_on_cpu(x, count) if x.device.type == "cpu" and x.numel() else reference(x, count)


@define_op(fake=lambda packed, n: packed.new_empty((packed.shape[0], n), dtype=torch.float32))
def unpack_signs(packed: Tensor, n: int) -> Tensor:
    """Unpack the result of `pack_signs`.

    Args:
        packed: `[rows, 4 + ceil(n / 8)]` of uint8.
        n: Numbers a row.

    Returns:
        `[rows, n]` of float32: the row's scale with the number's sign.
    """
    if takes_triton(packed) and n:
        return launch_unpack(packed, n)
    if packed.device.type != "cpu" or not n:
        return unpack_reference(packed, n)
    return signs_cpp.unpack(packed, n) if signs_cpp.is_used(packed) else _unpack_on_cpu(packed, n)
