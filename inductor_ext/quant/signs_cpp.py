"""Signs on a CPU in C++, with as few passes over memory as possible.

    take_in   x = (m * keep + g * rate) + e, its signs, the sum of its squares        one pass: reads m, g, e; writes x
              x = x - scale * sign(x)                                                 one pass: reads and writes x
    average   y = sum over ranks of scale * sign / ranks + f, signs and squares       then as above
    unpack    scale * sign

Blocks of `BLOCK` numbers go to torch's threads, sixteen numbers at a time. Products are rounded before they are added,
as torch does, and squares are summed in float64, so that results equal those of `signs.py`, whatever the number of
threads. The library is built once, by Inductor's compiler into Inductor's cache. If it cannot be built, `library` warns
once and returns None: torch then does the same in more passes, several times as slowly.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache

import torch
from torch import Tensor

from dsgraph.inductor_ext.compat import cpp_library

# For fewer numbers torch is as fast, and nothing needs to be built.
FROM = 2**12

_SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

typedef int64_t Int;
typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t Bits __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));
typedef double Wide __attribute__((vector_size(64)));

static const Int BLOCK = 1 << 15;  // a multiple of 16; 128 KiB
static const Int HEAD = 4;         // bytes of a row's scale

static inline Sixteen all(float x) { return Sixteen{} + x; }

static inline Sixteen load(const float* from, Int count) {
  Sixteen x{};
  if (count == 16) std::memcpy(&x, from, 64);
  else std::memcpy(&x, from, 4 * count);
  return x;
}

static inline void store(float* to, Sixteen x, Int count) {
  if (count == 16) std::memcpy(to, &x, 64);
  else std::memcpy(to, &x, 4 * count);
}

static inline uint16_t signs_of(Sixteen x) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)x);
#elif defined(__AVX__)
  __m256 halves[2];
  std::memcpy(halves, &x, 64);
  return _mm256_movemask_ps(halves[0]) | (_mm256_movemask_ps(halves[1]) << 8);
#else
  Bits bits;
  std::memcpy(&bits, &x, 64);
  uint16_t signs = 0;
  for (int i = 0; i < 16; ++i) signs |= (uint16_t)((uint32_t)bits[i] >> 31) << i;
  return signs;
#endif
}

static inline void put_signs(uint8_t* to, Sixteen x, Int count) {
  uint16_t signs = signs_of(x);
  to[0] = signs & 255;
  if (count > 8) to[1] = signs >> 8;
}

static inline Sixteen take_signs(const uint8_t* from, float scale, Int count) {
  uint16_t signs = from[0] | (count > 8 ? from[1] << 8 : 0);
#if defined(__AVX512F__)
  Sixteen x = (Sixteen)_mm512_mask_blend_ps(signs, (__m512)all(scale), (__m512)all(-scale));
#else
  const Bits each = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  Bits set = ((Bits{} + (int32_t)signs) & each) == each;
  Sixteen x = (Sixteen)(((Bits)all(-scale) & set) | ((Bits)all(scale) & ~set));
#endif
  return x;
}

struct Squares {
  Wide low{}, high{};
  inline void add(Sixteen x) {
    Half halves[2];
    std::memcpy(halves, &x, 64);
    Wide a = __builtin_convertvector(halves[0], Wide), b = __builtin_convertvector(halves[1], Wide);
    low += a * a;
    high += b * b;
  }
  double total() const {
    Wide both = low + high;
    double sum = 0;
    for (int i = 0; i < 8; ++i) sum += both[i];
    return sum;
  }
};

static inline float scale_at(const uint8_t* row) {
  float scale;
  std::memcpy(&scale, row, HEAD);
  return scale;
}

static inline Sixteen rest(Sixteen x, float scale) {
  Bits sign = Bits{} + (int32_t)0x80000000;
  return x - (Sixteen)(((Bits)x & sign) | (Bits)all(scale));
}

static inline int team(Int blocks, int threads) { return (int)std::max<Int>(1, std::min<Int>(threads, blocks)); }

// The part of count blocks that is this thread's, of those of the team that runs it.
struct Mine {
  Int first, last;
  explicit Mine(Int count) {
#if defined(_OPENMP)
    Int thread = omp_get_thread_num(), threads = omp_get_num_threads();
#else
    Int thread = 0, threads = 1;
#endif
    first = count * thread / threads;
    last = count * (thread + 1) / threads;
  }
};

// Fills x[count] with what compute(i, how many) gives for sixteen numbers; packs it into row; leaves in x what is lost.
// A thread's second pass goes backwards: what it wrote last is in its cache.
template <class Compute>
static void compress(float* x, uint8_t* row, Int count, int threads, Compute compute) {
  Int blocks = (count + BLOCK - 1) / BLOCK;
  std::vector<double> sums(blocks);
  uint8_t* signs = row + HEAD;
#pragma omp parallel num_threads(team(blocks, threads))
  {
    Mine mine(blocks);
    for (Int block = mine.first; block < mine.last; ++block) {
      Int i = block * BLOCK, last = std::min(count, i + BLOCK);
      Squares squares;
      for (; i + 16 <= last; i += 16) {
        Sixteen number = compute(i, 16);
        store(x + i, number, 16);
        put_signs(signs + i / 8, number, 16);
        squares.add(number);
      }
      if (i < last) {  // signs past the end become 0
        store(x + i, compute(i, last - i), last - i);
        Sixteen number = load(x + i, last - i);
        put_signs(signs + i / 8, number, last - i);
        squares.add(number);
      }
      sums[block] = squares.total();
    }
#pragma omp barrier
    double sum = 0;
    for (double each : sums) sum += each;
    float scale = (float)(std::sqrt(sum) / std::sqrt((double)std::max<Int>(count, 1)));
#pragma omp master
    std::memcpy(row, &scale, HEAD);
    for (Int block = mine.last - 1; block >= mine.first; --block) {
      Int i = block * BLOCK, last = std::min(count, i + BLOCK);
      for (; i + 16 <= last; i += 16) store(x + i, rest(load(x + i, 16), scale), 16);
      if (i < last) store(x + i, rest(load(x + i, last - i), scale), last - i);
    }
  }
}

extern "C" {

// rows of n numbers, count in all; packed: rows of row_bytes, zeros
void take_in(const float* grad, const float* momentum, const float* error, float keep, float rate, float* x,
             uint8_t* packed, Int rows, Int n, Int count, Int row_bytes, int threads) {
  for (Int row = 0; row < rows; ++row) {
    Int at = std::min(count, row * n), there = std::min(n, count - at);
    const float *g = grad + at, *m = momentum + at, *e = error + at;
    compress(x + at, packed + row * row_bytes, there, threads, [=](Int i, Int some) {
      Sixteen kept = load(m + i, some) * all(keep), taken = load(g + i, some) * all(rate);
      return (kept + taken) + load(e + i, some);
    });
  }
}

// received: ranks rows of row_bytes; error, y: own numbers; packed: one row, zeros
void average(const uint8_t* received, const float* error, float* y, uint8_t* packed, Int ranks, Int own, Int row_bytes,
             int threads) {
  compress(y, packed, own, threads, [=](Int i, Int some) {
    const uint8_t* row = received;
    Sixteen sum = take_signs(row + HEAD + i / 8, scale_at(row), some);
    for (Int rank = 1; rank < ranks; ++rank) {
      row += row_bytes;
      sum += take_signs(row + HEAD + i / 8, scale_at(row), some);
    }
    if (ranks > 1) sum /= all((float)ranks);
    return sum + load(error + i, some);
  });
}

void unpack(const uint8_t* packed, float* result, Int rows, Int n, Int row_bytes, int threads) {
  for (Int row = 0; row < rows; ++row) {
    const uint8_t* from = packed + row * row_bytes;
    float scale = scale_at(from), *to = result + row * n;
    Int blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(team(blocks, threads)) schedule(static)
    for (Int block = 0; block < blocks; ++block) {
      Int i = block * BLOCK, last = std::min(n, i + BLOCK);
      for (; i + 16 <= last; i += 16) store(to + i, take_signs(from + HEAD + i / 8, scale, 16), 16);
      if (i < last) store(to + i, take_signs(from + HEAD + i / 8, scale, last - i), last - i);
    }
  }
}

}
"""


@cache
def library() -> ctypes.CDLL | None:
    """Return the functions of the source above; None, after a warning, if it cannot be built."""
    try:
        return cpp_library(_SOURCE)
    except (RuntimeError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            "signs of momentum are packed by torch, several times as slowly as in C++, which cannot be built: "
            f"{reason}",
            stacklevel=2,
        )
        return None


def is_used(*tensors: Tensor) -> bool:
    """Return whether functions here are used for these tensors: the size of the first one decides."""
    if not all(each.device.type == "cpu" for each in tensors) or tensors[0].numel() < FROM:
        return False
    return library() is not None


def take_in(grad: Tensor, momentum: Tensor, error: Tensor, coefficients: Tensor, packed: Tensor, *, n: int) -> Tensor:
    """Pack x into `packed`, `[rows, bytes]` of zeros.

    Args:
        grad: `[count]`, of any dtype.
        momentum: `[count]` of float32, like all following ones.
        error: `[count]`.
        coefficients: `[2]`: keep and rate.
        packed: The tensor to send.
        n: Number of elements of each row but the last.

    Returns:
        `[count]`, the new error.
    """
    grad, momentum, error = grad.float().contiguous(), momentum.contiguous(), error.contiguous()
    (keep, rate), x = coefficients.tolist(), torch.empty_like(error)
    (rows, size), count = packed.shape, error.numel()
    _call("take_in", grad, momentum, error, ctypes.c_float(keep), ctypes.c_float(rate), x, packed, rows, n, count, size)
    return x


def average(received: Tensor, error: Tensor, packed: Tensor) -> Tensor:
    """Pack y, from `received`, `[ranks, bytes]`, into `packed`, `[1, bytes]` of zeros; return the new error."""
    received, error = received.contiguous(), error.contiguous()
    y = torch.empty_like(error)
    _call("average", received, error, y, packed, received.shape[0], error.numel(), received.shape[1])
    return y


def unpack(packed: Tensor, n: int) -> Tensor:
    """Unpack `[rows, bytes]` to `[rows, n]`."""
    packed = packed.contiguous()
    result = torch.empty((packed.shape[0], n))
    _call("unpack", packed, result, packed.shape[0], n, packed.shape[1])
    return result


def _call(name: str, *arguments: Tensor | int | ctypes.c_float) -> None:
    found = library()
    assert found is not None
    given = [ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments]
    wide = [ctypes.c_int64(each) if isinstance(each, int) else each for each in given]
    getattr(found, name)(*wide, ctypes.c_int(torch.get_num_threads()))
