"""Attention of one query over a static cache on a CPU in C++: only the filled part is read, once.

`decode_attention.py` has the formula. Threads divide the heads. A head's scores are float32, in memory that stays in
its core's cache; values are summed in registers, 64 columns at a time.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from dsgraph.inductor_ext.ops import define_native

from . import vectors_cpp
from .skinny_cpp import FLOATING

_SOURCE = r"""
static const int PARTS = 4;  // vectors of columns that are added up at a time

struct Cache {
  const void* data;
  Int sequence, head, place;  // strides
  explicit Cache(const Tensor& x) : data(x.data_ptr()), sequence(x.stride(0)), head(x.stride(1)), place(x.stride(2)) {}
  template <class T> const T* at(Int b, Int g) const { return (const T*)data + b * sequence + g * head; }
};

template <class T> static inline float product(const T* q, const T* key, Int d) {
  Vec sum{};
  Int i = 0;
  for (; i + LANES <= d; i += LANES) sum += wide(q + i, LANES) * wide(key + i, LANES);
  if (i < d) sum += wide(q + i, d - i) * wide(key + i, d - i);
  return total(sum);
}

// y[d] = sum over places of weight * value
template <class T>
static inline void average(const float* weights, const T* values, Int stride, Int filled, Int d, float sum, T* y) {
  for (Int i = 0; i < d; i += PARTS * LANES) {
    Vec found[PARTS] = {};
    Int columns = std::min<Int>(PARTS * LANES, d - i);
    for (Int place = 0; place < filled; ++place) {
      const T* from = values + place * stride + i;
      Vec weight = all(weights[place]);
      if (columns == PARTS * LANES)
        for (int part = 0; part < PARTS; ++part) found[part] += weight * wide(from + part * LANES, LANES);
      else
        for (Int at = 0; at < columns; at += LANES)
          found[at / LANES] += weight * wide(from + at, std::min<Int>(LANES, columns - at));
    }
    for (Int at = 0; at < columns; ++at) put(y + i + at, found[at / LANES][at % LANES] / sum);
  }
}

template <class T>
static void head(const T* q, const T* keys, Int key_stride, const T* values, Int value_stride, const bool* mask,
                 Int mask_stride, Int places, Int d, float scale, T* y) {
  static thread_local std::vector<float> weights;
  Int filled = places;
  while (filled > 1 && !mask[(filled - 1) * mask_stride]) --filled;
  weights.resize(std::max<Int>(weights.size(), filled));
  float most = -INFINITY, sum = 0;
  for (Int place = 0; place < filled; ++place) {
    weights[place] = mask[place * mask_stride] ? scale * product(q, keys + place * key_stride, d) : -INFINITY;
    most = std::max(most, weights[place]);
  }
  for (Int place = 0; place < filled; ++place) {
    weights[place] = std::exp(weights[place] - most);
    sum += weights[place];
  }
  average(weights.data(), values, value_stride, filled, d, sum, y);
}

template <class T>
static void heads(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& mask, float scale,
                  Tensor& y) {
  Int b = q.size(0), h = q.size(1), d = q.size(3), group = h / keys.size(1), places = keys.size(2);
  Int q_sequence = q.stride(0), q_head = q.stride(1), mask_place = mask.stride(3);
  Int mask_sequence = mask.size(0) > 1 ? mask.stride(0) : 0;
  Cache of_keys(keys), of_values(values);
  const T* from = (const T*)q.data_ptr();
  const bool* seen = (const bool*)mask.data_ptr();
  T* to = (T*)y.data_ptr();
  torch::stable::parallel_for(0, b * h, (b * h + threads() - 1) / threads(), [&](Int first, Int last) {
    for (Int item = first; item < last; ++item) {
      Int at = item / h, i = item % h;
      head<T>(from + at * q_sequence + i * q_head, of_keys.at<T>(at, i / group), of_keys.place,
              of_values.at<T>(at, i / group), of_values.place, seen + at * mask_sequence, mask_place, places, d, scale,
              to + item * d);
    }
  });
}

static Tensor decode_attention_product(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& mask,
                                       double scale) {
  STD_TORCH_CHECK(q.stride(3) == 1 && keys.stride(3) == 1 && values.stride(3) == 1, "columns are not neighbours");
  Tensor y = empty(q, {q.size(0), q.size(1), 1, q.size(3)});
  if (q.scalar_type() == Type::Float) heads<float>(q, keys, values, mask, scale, y);
  else heads<uint16_t>(q, keys, values, mask, scale, y);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(dsgraph, CPU, m) {
  m.impl("decode_attention_product", TORCH_BOX(&decode_attention_product));
}
"""


@cache
def library() -> ctypes.CDLL | None:
    """Return the library of the source above, which registers its kernel.

    None, after a warning, if it cannot be built.
    """
    return vectors_cpp.library(_SOURCE, what="attention over a cache is")


@define_native(fake=lambda q, *others: q.new_empty(q.shape), load=library)
def decode_attention_product(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute `decode_attention` for tensors that `takes` accepts."""
    shared = keys.shape[1] != q.shape[1]
    y = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, scale=scale, enable_gqa=shared
    )
    return y.contiguous()


def takes(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> bool:
    """Return whether the op above supports these in C++: on a CPU, its dtypes and shapes, contiguous columns."""
    tensors = (q, keys, values)
    if not all(each.device.type == "cpu" and each.dtype == q.dtype for each in tensors) or q.dtype not in FLOATING:
        return False
    if mask.device.type != "cpu" or mask.dtype != torch.bool or not all(each.stride(-1) == 1 for each in tensors):
        return False
    (rows, heads, queries, width), (sequences, groups, length, columns) = q.shape, keys.shape
    if (queries, sequences, columns) != (1, rows, width) or keys.shape != values.shape or heads % groups:
        return False
    return mask.shape in ((1, 1, 1, length), (rows, 1, 1, length)) and library() is not None
