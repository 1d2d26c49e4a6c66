"""The C++ source of skinny matmuls, compiled after the definitions of `vectors_cpp`.

Threads divide rows of the weight. Four rows at a time are multiplied by up to four rows of x: each pair has a vector of
sums, so no sum waits for itself, and a row of the weight stays in the cache for the next rows of x. Bytes become
float32 in registers; for 4 bits by a table of the group's sixteen values. The next four rows are prefetched. Sums are
in float32, y is rounded once.
"""

from __future__ import annotations

SOURCE = r"""
static const int ROWS = 4;           // of the weight at a time
static const int MOST = LANES / 4;   // of x at a time: as many sums as there are registers for

// Prefetches one cache line of each of R rows.
template <int R, class T> static INLINE void fetch(const T* at, Int stride) {
  UNROLL for (int r = 0; r < R; ++r) __builtin_prefetch(at + r * stride, 0, 3);
}

// Weights whose numbers have one dtype: rows of k.
template <class T> struct Plain {
  static const int LINE = 64 / sizeof(T);
  const T* w;
  Int k;

  template <int R, int M> INLINE void add(Vec (&sum)[R][M], const float* x, Int row) const {
    const T* at = w + row * k;
    Int i = 0;
    for (; i + LINE <= k; i += LINE) {
      fetch<R>(at + R * k + i, k);
      UNROLL for (int part = 0; part < LINE; part += LANES) step<R, M>(sum, x, at, i + part, LANES);
    }
    for (; i < k; i += LANES) step<R, M>(sum, x, at, i, std::min<Int>(LANES, k - i));
  }

  template <int R, int M> INLINE void step(Vec (&sum)[R][M], const float* x, const T* at, Int i, Int count) const {
    Vec part[M];
    UNROLL for (int m = 0; m < M; ++m) keep(part[m] = take<Vec>(x + m * k + i, count));
    UNROLL for (int r = 0; r < R; ++r) {
      Vec number = wide(at + r * k + i, count);
      UNROLL for (int m = 0; m < M; ++m) sum[r][m] += number * part[m];
    }
  }
};

// The sixteen numbers of a group of 4 bits: a table of them, or what computes them.
struct Numbers {
#if LANES == 16
  Vec table;
  INLINE void set(float scale, float least) {
    const Vec upto = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    table = upto * scale + least;
  }
  INLINE Vec low(Ints bits) const { return (Vec)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)bits, (__m512)table); }
  INLINE Vec high(Ints bits) const { return low(bits >> 4); }
#else
  float scale, least;
  INLINE void set(float a, float b) { scale = a, least = b; }
  INLINE Vec low(Ints bits) const { return __builtin_convertvector(bits & 15, Vec) * all(scale) + all(least); }
  INLINE Vec high(Ints bits) const { return __builtin_convertvector(bits >> 4, Vec) * all(scale) + all(least); }
#endif
};

// Weights of 4 bits: of each row groups of 2 * half numbers, with a scale and a minimum each.
struct Packed {
  const uint8_t* w;
  const float *scale, *least;
  Int groups, half;

  template <int R, int M> INLINE void add(Vec (&sum)[R][M], const float* x, Int row) const {
    for (Int group = 0; group < groups; ++group) {
      Numbers of[R];
      UNROLL for (int r = 0; r < R; ++r) {
        Int place = (row + r) * groups + group;
        of[r].set(scale[place], least[place]);
      }
      const uint8_t* at = w + (row * groups + group) * half;
      for (Int i = 0; i < half; i += 64) fetch<R>(at + R * groups * half + i, groups * half);
      const float* of_group = x + 2 * half * group;
      Int i = 0;
      for (; i + LANES <= half; i += LANES) step<R, M>(sum, of, of_group, at, i, LANES);
      if (i < half) step<R, M>(sum, of, of_group, at, i, half - i);
    }
  }

  template <int R, int M>
  INLINE void step(Vec (&sum)[R][M], const Numbers (&of)[R], const float* x, const uint8_t* at, Int i,
                   Int count) const {
    Vec low[M], high[M];
    UNROLL for (int m = 0; m < M; ++m) {
      keep(low[m] = take<Vec>(x + 2 * m * groups * half + i, count));
      keep(high[m] = take<Vec>(x + 2 * m * groups * half + half + i, count));
    }
    UNROLL for (int r = 0; r < R; ++r) {
      Ints bits = numbers(take<Bytes>(at + r * groups * half + i, count));
      Vec one = of[r].low(bits), other = of[r].high(bits);
      UNROLL for (int m = 0; m < M; ++m) sum[r][m] += one * low[m];
      UNROLL for (int m = 0; m < M; ++m) sum[r][m] += other * high[m];
    }
  }
};

struct Task {
  static const Int LEAST = 1 << 14;  // numbers of the weight for which a thread is woken
  const float* x;
  Int m, n, k;
  const float* scale;
  const void* bias;
  void* y;
  bool is_float;  // bias and y; else bfloat16

  template <int R, int M, class Weight> INLINE void block(const Weight& weight, Int row, Int first) const {
    Vec sum[R][M] = {};
    weight.template add<R, M>(sum, x + first * k, row);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int m = 0; m < M; ++m) store(total(sum[r][m]), first + m, row + r);
  }

  INLINE void store(float found, Int at, Int row) const {
    if (scale) found *= scale[row];
    if (bias) found += is_float ? ((const float*)bias)[row] : as_float(((const uint16_t*)bias)[row]);
    if (is_float) put((float*)y + at * n + row, found);
    else put((uint16_t*)y + at * n + row, found);
  }

  template <int R, class Weight> INLINE void rows(const Weight& weight, Int row) const {
    Int i = 0;
    for (; i + MOST <= m; i += MOST) block<R, MOST>(weight, row, i);
    if (MOST > 2 && i + 2 <= m) {
      block<R, 2>(weight, row, i);
      i += 2;
    }
    if (i < m) block<R, 1>(weight, row, i);
  }

  template <class Weight> void run(const Weight& weight) const {
    Int blocks = (n + ROWS - 1) / ROWS;
    torch::stable::parallel_for(0, blocks, std::max<Int>(LEAST / (ROWS * k) + 1, (blocks + threads() - 1) / threads()),
      [&](Int first, Int last) {
        Int row = first * ROWS, end = std::min(n, last * ROWS);
        for (; row + ROWS <= end; row += ROWS) rows<ROWS>(weight, row);
        for (; row < end; ++row) rows<1>(weight, row);
      });
  }
};

static const float* as_floats(const Tensor& x, std::vector<float>& memory) {
  if (x.scalar_type() == Type::Float) return (const float*)x.data_ptr();
  const uint16_t* from = (const uint16_t*)x.data_ptr();
  memory.resize(x.numel());
  for (Int i = 0; i < x.numel(); ++i) memory[i] = as_float(from[i]);
  return memory.data();
}

static const void* data_of(const Perhaps& x) { return x ? x->data_ptr() : nullptr; }

static void check(const Tensor& x, const Perhaps& bias, Int n, Int k) {
  STD_TORCH_CHECK(x.scalar_type() == Type::Float || x.scalar_type() == Type::BFloat16, "x is not float32 or bfloat16");
  STD_TORCH_CHECK(x.is_contiguous() && x.dim() > 0 && x.size(x.dim() - 1) == k && k > 0,
                  "x is not contiguous rows of ", k);
  STD_TORCH_CHECK(!bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == n && bias->is_contiguous()),
                  "the bias is not ", n, " numbers of the dtype of x");
}

static void check_floats(const Tensor& x, Int count) {
  STD_TORCH_CHECK(x.scalar_type() == Type::Float && x.numel() == count && x.is_contiguous(),
                  "scale and least are not ", count, " numbers of float32");
}

template <class Call>
static Tensor compute(const Tensor& x, Int n, const Perhaps& scale, const Perhaps& bias, Call call) {
  Int k = x.size(x.dim() - 1), m = x.numel() / k;
  std::vector<Int> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = n;
  Tensor y = empty(x, sizes);
  static thread_local std::vector<float> memory;
  call(Task{as_floats(x, memory), m, n, k, (const float*)data_of(scale), data_of(bias), y.data_ptr(),
            x.scalar_type() == Type::Float});
  return y;
}

static Tensor skinny_product(const Tensor& x, const Tensor& weight, const Perhaps& bias, const Perhaps& scale) {
  Int n = weight.size(0), k = weight.size(1);
  check(x, bias, n, k);
  if (scale) check_floats(*scale, n);
  STD_TORCH_CHECK(weight.is_contiguous(), "the weight is not contiguous");
  return compute(x, n, scale, bias, [&](const Task& task) {
    const void* w = weight.data_ptr();
    Type type = weight.scalar_type();
    if (type == Type::Float) task.run(Plain<float>{(const float*)w, k});
    else if (type == Type::BFloat16) task.run(Plain<uint16_t>{(const uint16_t*)w, k});
    else {
      STD_TORCH_CHECK(type == Type::Char, "the weight is not float32, bfloat16 or int8");
      task.run(Plain<int8_t>{(const int8_t*)w, k});
    }
  });
}

static Tensor skinny_product_groups(const Tensor& x, const Tensor& packed, const Tensor& scale, const Tensor& least,
                                      const Perhaps& bias) {
  Int n = packed.size(0), groups = packed.size(1), half = packed.size(2);
  check(x, bias, n, 2 * groups * half);
  check_floats(scale, n * groups);
  check_floats(least, n * groups);
  STD_TORCH_CHECK(packed.scalar_type() == Type::Byte && packed.is_contiguous(), "the bytes are not contiguous uint8");
  return compute(x, n, {}, bias, [&](const Task& task) {
    task.run(Packed{(const uint8_t*)packed.data_ptr(), (const float*)scale.data_ptr(), (const float*)least.data_ptr(),
                    groups, half});
  });
}

STABLE_TORCH_LIBRARY_IMPL(dsgraph, CPU, m) {
  m.impl("skinny_product", TORCH_BOX(&skinny_product));
  m.impl("skinny_product_groups", TORCH_BOX(&skinny_product_groups));
}
"""
