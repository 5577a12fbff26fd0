// y = W norm(x) + bias, for few rows x and a W too large for the processor's cache: what counts is to read W once, at
// the speed of the memory. Twin in PyTorch: packed.py and F.linear. Shapes: x (M, K), W (N, K), y (M, N).
//
// A quantised W stands in groups of 32 values along K that share a float16 scale (and offset): value = scale * q +
// offset. x is rounded to int8 under a scale for each of the same groups, so that 64 products are one instruction
// (vpdpbusd: 16 sums of four u8 * s8). It wants one side unsigned; W plays it, with its zero point moved to 0:
//
//     sum (q - zero) x = sum q x - zero sum x        the sums of x are known before W is read
#pragma once
#include <omp.h>

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

// One of the threads that run the same code side by side.
struct Member {
  int64_t number = omp_get_thread_num(), count = omp_get_num_threads();
  int64_t first(int64_t total) const { return total * number / count; }
  int64_t last(int64_t total) const { return total * (number + 1) / count; }
};

// --- x, ready to meet W; every thread makes its own, which is cheaper than to wait for one that does

struct Row {
  std::vector<float> values;
  std::vector<uint16_t> halves;
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
  if (w.kind == HALF) {
    row.halves.resize(w.K);
    for (int64_t k = 0; k < w.K; k++) row.halves[k] = to_bfloat16(row.values[k]);
  }
  if (w.kind == EIGHT || w.kind == FOUR) quantize(row, w);
}

// --- rows of W against a few x

constexpr int64_t FEW = 16;    // rows of x; with more prompt.h is faster
constexpr int64_t SHARE = 16;  // rows of W: what threads divide among themselves

inline int64_t row_bytes(const Matrix& w) {
  return w.kind == FULL ? w.K * 4 : w.kind == HALF ? w.K * 2 : w.num_groups * (w.kind == EIGHT ? 32 : 16);
}

inline Matrix rows_from(Matrix w, int64_t n) {
  w.N -= n;
  w.values = (const char*)w.values + n * row_bytes(w);
  w.scales += n * w.num_groups;
  if (w.offsets) w.offsets += n * w.num_groups;
  if (w.bias) w.bias += n;
  return w;
}

// Where products go: y (M, N) becomes one plus `residual`, which may be null or y, or with `scale` y times one.
struct Products {
  float* y;
  int64_t N;
  const float* residual;
  bool scale;
  void put(int64_t m, int64_t n, float product) const {
    const int64_t place = m * N + n;
    y[place] = scale ? y[place] * product : product + (residual ? residual[place] : 0);
  }
};

inline float dot(const Matrix& w, int64_t n, const Row& x) {
  if (w.kind == FULL) return dot_full((const float*)w.values + n * w.K, x.values.data(), w.K);
  if (w.kind == HALF) return dot_half((const uint16_t*)w.values + n * w.K, x.halves.data(), w.K);
  const int64_t first = n * w.num_groups;
  const Groups groups{x.quants.data(), x.scales.data(), x.sums.data(), w.num_groups};
  const GroupScales scales{w.scales + first, w.offsets ? w.offsets + first : nullptr, float(-zero_of(w))};
  if (w.kind == EIGHT) return dot_eight((const uint8_t*)w.values + first * 32, scales, groups);
  return dot_four((const uint8_t*)w.values + first * 16, scales, groups);
}

// Rows [first, last) of W one after the other. What comes 5 KB later is sent for meanwhile, to the second-level cache,
// which takes more requests at once than the first. The processor itself looks ahead too, but less the busier the memory
// is: several rows far apart, left to it alone, took 8 ms for SmolLM2's weights in a quiet minute and 15 in a busy one,
// where this takes 9 and 10.
inline void multiply(const Products& to, const Matrix& w, int64_t first, int64_t last, const Row* x, int64_t M) {
  const int64_t bytes = row_bytes(w);
  for (int64_t n = first; n < last; n++) {
    const char* next = (const char*)w.values + n * bytes + 5120;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(next + byte, 0, 2);
    for (int64_t m = 0; m < M; m++) to.put(m, n, dot(w, n, x[m]) + (w.bias ? w.bias[n] : 0));
  }
}

inline void activate(float* x, int64_t count, Activation activation) {
  for (int64_t i = 0; activation == RELU && i < count; i++) x[i] = x[i] > 0 ? x[i] : 0;
  for (int64_t i = 0; activation == GELU && i < count; i++) x[i] *= 0.5f * (1 + std::erf(x[i] * 0.70710678f));
  for (int64_t i = 0; activation == GELU_TANH && i < count; i++)
    x[i] -= x[i] / (1 + exponential(1.59576912f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
  for (int64_t i = 0; activation == SILU && i < count; i++) x[i] /= 1 + exponential(-x[i]);
}

// gated: W holds the gate's rows and then the up rows; y = activation(gate) * up. `residual` (M, N) may be null or y, and
// there is no activation with it.
inline void linear(const Member& me, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                   Activation activation, bool gated, const float* residual) {
  thread_local std::vector<Row> prepared;
  if (int64_t(prepared.size()) < M) prepared.resize(M);
  for (int64_t m = 0; m < M; m++) prepare(prepared[m], x + m * w.K, w, norm);
  const int64_t N = w.N / (gated ? 2 : 1), shares = (N + SHARE - 1) / SHARE;
  const int64_t first = me.first(shares) * SHARE, last = std::min(N, me.last(shares) * SHARE);
  multiply({y, N, residual, false}, w, first, last, prepared.data(), M);
  for (int64_t m = 0; m < M; m++) activate(y + m * N + first, last - first, activation);
  if (gated) multiply({y, N, nullptr, true}, rows_from(w, N), first, last, prepared.data(), M);
}
