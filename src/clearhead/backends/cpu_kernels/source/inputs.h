// What a product is given: W as it is stored, a norm, and rows of x made ready to meet W.
//
// A quantised W stands in groups of 32 values along K that share a float16 scale (and offset): value = scale * q +
// offset. x is rounded to int8 under a scale for each of the same groups, so that 64 products are one instruction
// (vpdpbusd: 16 sums of four u8 * s8). It wants one side unsigned; W plays it, with its zero point moved to 0:
//
//     sum (q - zero) x = sum q x - zero sum x        the sums of x are known before W is read
//
// Shapes: x (M, K), W (N, K), y (M, N).
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

enum Kind : int32_t { FULL, HALF, EIGHT, FOUR };  // float32, bfloat16, 8-bit groups, 4-bit groups
enum NormKind : int32_t { NO_NORM, ROOT_MEAN_SQUARE, LAYER_NORM };
enum Activation : int32_t { IDENTITY, RELU, GELU, GELU_TANH, SILU };

struct Matrix {
  Kind kind;
  int32_t num_groups;       // of 32 along K, an even number
  int64_t N, K;
  const void* values;       // (N, K) float, bfloat16 or int8; (N, K/2) bytes of two 4-bit values
  const uint16_t* scales;   // (N, num_groups) float16
  const uint16_t* offsets;  // (N, num_groups) float16, or null: four bits then mean q - 8
  const float* bias;        // (N,) or null
};

struct Norm {
  NormKind kind;
  float epsilon;
  const float *weight, *bias;  // (K,); bias may be null
};

inline int64_t row_bytes(const Matrix& w) {
  return w.kind == FULL ? w.K * 4 : w.kind == HALF ? w.K * 2 : w.num_groups * (w.kind == EIGHT ? 32 : 16);
}

// One row of x for a quantised W.
struct Row {
  std::vector<float> values;
  std::vector<int8_t> quants;       // in the order in which W's values come out of the vector registers
  std::vector<float> scales, sums;  // (K/32), in whole vectors; sums are scale * sum of quants
};

inline void normalize(float* y, const float* x, int64_t K, const Norm& norm) {
  if (norm.kind == NO_NORM) {
    if (y != x) std::copy(x, x + K, y);
    return;
  }
  float mean = 0, squares = 0;
  if (norm.kind == LAYER_NORM) {
    for (int64_t k = 0; k < K; k++) mean += x[k];
    mean /= K;
  }
  for (int64_t k = 0; k < K; k++) squares += (x[k] - mean) * (x[k] - mean);
  const float scale = 1 / std::sqrt(squares / K + norm.epsilon);
  for (int64_t k = 0; k < K; k++) y[k] = (x[k] - mean) * scale * norm.weight[k] + (norm.bias ? norm.bias[k] : 0);
}

// Four bits: a byte holds values j and j + 16 of its group; a register holds two groups a and b as
// a0-15 b0-15 a16-31 b16-31.
inline int64_t place_of(int64_t k, Kind kind) {
  if (kind == EIGHT) return k;
  const int64_t group = (k / 32) % 2, half = (k / 16) % 2;
  return k / 64 * 64 + half * 32 + group * 16 + k % 16;
}

struct Rounded {
  float scale;
  int sum;  // of the quants
};

// 32 numbers to int8. Without their sign, numbers compare as their bits do, and what is none or infinite comes last: the
// scale is NaN then, for integers have no such thing.
inline Rounded quantize_group(int8_t* quants, const float* part) {
  int32_t bits[32], last = 0, sum = 0;
  std::memcpy(bits, part, sizeof(bits));
  for (int j = 0; j < 32; j++) last = std::max(last, bits[j] & 0x7fffffff);
  float largest;
  std::memcpy(&largest, &last, sizeof(last));
  const float inverse = largest > 0 ? 127 / largest : 0;
  for (int j = 0; j < 32; j++) bits[j] = int32_t(__builtin_rintf(part[j] * inverse));
  for (int j = 0; j < 32; j++) quants[j] = int8_t(bits[j]), sum += quants[j];
  return {last < 0x7f800000 ? largest / 127 : NAN, sum};
}

// What x's sum counts for where W plays with its zero point moved.
inline int zero_of(const Matrix& w) { return w.kind == EIGHT ? 128 : w.offsets ? 0 : 8; }

inline void quantize(Row& row, const Matrix& w) {
  row.quants.resize(w.num_groups * 32);
  row.scales.assign((w.num_groups + 15) / 16 * 16, 0);
  row.sums.assign(row.scales.size(), 0);
  for (int64_t g = 0; g < w.num_groups; g++) {
    int8_t quants[32];
    const auto [scale, sum] = quantize_group(quants, &row.values[g * 32]);
    for (int half = 0; half < 32; half += 16)
      std::copy(quants + half, quants + half + 16, &row.quants[place_of(g * 32 + half, w.kind)]);
    row.scales[g] = scale;
    row.sums[g] = scale * sum;
  }
}

inline void prepare(Row& row, const float* x, const Matrix& w, const Norm& norm) {
  row.values.assign(std::max<int64_t>(w.K, w.num_groups * 32), 0);
  normalize(row.values.data(), x, w.K, norm);
  quantize(row, w);
}

inline int64_t words_of(const Matrix& w) {  // of a row of x, up to a whole vector
  return w.kind == FULL ? (w.K + 15) / 16 * 16 : w.kind == HALF ? (w.K + 31) / 32 * 16 : int64_t(w.num_groups) * 8;
}

// Rows of x for a plain W, and for any in panels.
struct Rows {
  std::vector<uint32_t> words;  // (M, words)
  std::vector<int32_t> start;   // (M, K/32), and so the others
  std::vector<float> scales, sums;

  // For the longest rows that will come.
  void reserve(int64_t M, int64_t longest) {
    words.resize(std::max<size_t>(words.size(), M * longest));
    start.resize(std::max<size_t>(start.size(), M * (longest / 8 + 1)));
    scales.resize(start.size());
    sums.resize(start.size());
  }

  void put(int64_t m, const float* x, const Matrix& w, const Norm& norm) {
    thread_local std::vector<float> values;
    values.assign(words_of(w) * (w.kind == FULL ? 1 : w.kind == HALF ? 2 : 4), 0);
    normalize(values.data(), x, w.K, norm);
    uint32_t* to = &words[m * words_of(w)];
    if (w.kind == FULL) std::memcpy(to, values.data(), words_of(w) * 4);
    if (w.kind == HALF)
      for (int64_t i = 0; i < words_of(w); i++)
        to[i] = to_bfloat16(values[2 * i]) | uint32_t(to_bfloat16(values[2 * i + 1])) << 16;
    for (int64_t g = 0; g < w.num_groups; g++) {
      const int64_t place = m * w.num_groups + g;
      const auto [scale, sum] = quantize_group((int8_t*)(to + g * 8), &values[g * 32]);
      start[place] = -zero_of(w) * sum;
      scales[place] = scale;
      sums[place] = scale * sum;
    }
  }
};
