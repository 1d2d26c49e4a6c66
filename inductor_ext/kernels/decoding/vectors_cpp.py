"""Code shared by the C++ kernels: vectors of float32 from all dtypes, and the build of a library of ops.

Such a library registers kernels of ops with torch when it is loaded, through torch's stable interface: a call takes two
microseconds, a tenth of a call of a Python op. It is built once, by Inductor's compiler into Inductor's cache. gcc's
and clang's vectors are as wide as the CPU's registers.
"""

from __future__ import annotations

import ctypes
import warnings

from dsgraph.inductor_ext.compat import cpp_library

_VECTORS = r"""
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 4")  // so that sums stay in registers

typedef int64_t Int;
typedef torch::stable::Tensor Tensor;
typedef std::optional<Tensor> Perhaps;
typedef torch::headeronly::ScalarType Type;
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

template <class V, class T> static inline V take(const T* from, Int count = LANES) {
  V v{};
  if (count == LANES) std::memcpy(&v, from, sizeof v);
  else std::memcpy(&v, from, count * sizeof(T));
  return v;
}

static inline Vec all(float x) { return Vec{} + x; }
static inline Vec wide(const float* from, Int count) { return take<Vec>(from, count); }
// gcc 12 makes many instructions of a conversion that widens vectors, where the CPU has one.
#if defined(__AVX512F__)
typedef __m128i Signed, Bytes;
typedef __m256i Halves;
static inline Ints ints(Signed x) { return (Ints)_mm512_cvtepi8_epi32(x); }
static inline Ints numbers(Bytes x) { return (Ints)_mm512_cvtepu8_epi32(x); }
static inline Ints numbers(Halves x) { return (Ints)_mm512_cvtepu16_epi32(x); }
#else
typedef int8_t Signed __attribute__((vector_size(LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
#if defined(__AVX2__)
static inline __m128i low(Signed x) { return _mm_loadl_epi64((const __m128i*)&x); }
static inline __m128i low(Bytes x) { return _mm_loadl_epi64((const __m128i*)&x); }
static inline Ints ints(Signed x) { return (Ints)_mm256_cvtepi8_epi32(low(x)); }
static inline Ints numbers(Bytes x) { return (Ints)_mm256_cvtepu8_epi32(low(x)); }
static inline Ints numbers(Halves x) { return (Ints)_mm256_cvtepu16_epi32((__m128i)x); }
#else
static inline Ints ints(Signed x) { return __builtin_convertvector(x, Ints); }
static inline Ints numbers(Bytes x) { return __builtin_convertvector(x, Ints); }
static inline Ints numbers(Halves x) { return __builtin_convertvector(x, Ints); }
#endif
#endif
static inline Vec wide(const uint16_t* from, Int count) {  // bfloat16
  return (Vec)(numbers(take<Halves>(from, count)) << 16);
}
static inline Vec wide(const int8_t* from, Int count) {
  return __builtin_convertvector(ints(take<Signed>(from, count)), Vec);
}

// Keeps a vector in a register, where gcc would read it from memory at each use.
static inline void keep(Vec& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
}

static inline float total(Vec v) {
  typedef float Half __attribute__((vector_size(2 * LANES)));
  typedef float Quarter __attribute__((vector_size(LANES)));
  Half halves[2];
  std::memcpy(halves, &v, sizeof v);
  halves[0] += halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, halves, sizeof quarters);
  quarters[0] += quarters[1];
  float sum = 0;
  for (int i = 0; i < LANES / 4; ++i) sum += quarters[0][i];
  return sum;
}

static inline float as_float(float x) { return x; }
static inline float as_float(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
static inline void put(float* to, float x) { *to = x; }
static inline void put(uint16_t* to, float x) {  // to nearest, of two the even one
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  *to = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

// Contiguous, of the dtype of x.
static inline Tensor empty(const Tensor& x, const std::vector<Int>& sizes) {
  std::vector<Int> strides(sizes.size());
  Int stride = 1;
  for (Int i = (Int)sizes.size() - 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  bool is_float = x.scalar_type() == Type::Float;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      sizes.size(), sizes.data(), strides.data(), is_float ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16(),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

static inline Int threads() { return std::max<Int>(1, torch::stable::get_num_threads()); }
"""


def library(source: str, *, what: str) -> ctypes.CDLL | None:
    """Build and load source after the vectors above; it registers its kernels.

    Args:
        source: C++.
        what: The functions that torch computes instead, for the warning if it cannot be built.
    """
    try:
        return cpp_library(_VECTORS + source, fuses_products=True)
    except (RuntimeError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"{what} computed by torch, some times as slowly as in C++, which cannot be built: {reason}", stacklevel=3
        )
        return None
