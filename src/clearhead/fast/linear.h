// y = W norm(x) + bias, for a W too large for the processor's cache: what counts is to read W once, at the speed of the
// memory; with ten rows of x and more, to multiply in every cycle. Twin in PyTorch: packed.py and F.linear.
// Shapes: x (M, K), W (N, K), y (M, N). For more rows of x: prompt.h.
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

#include "tiles.h"

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

// Numbers of rows of x. Up to ALONE meet a quantised W one by one, and up to MANY a plain W as it is stored; more of them
// meet panels (prompt.h). Up to FEW every thread makes all of them ready, which is cheaper than to wait for others.
constexpr int64_t ALONE = 4, FEW = 16, MANY = 96;
constexpr int64_t SHARE = 16;  // rows of W: what threads divide among themselves

inline int64_t row_bytes(const Matrix& w) {
  return w.kind == FULL ? w.K * 4 : w.kind == HALF ? w.K * 2 : w.num_groups * (w.kind == EIGHT ? 32 : 16);
}

// --- x, ready to meet W

// One row for a quantised W.
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

// Rows for a plain W, and for any in panels.
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

// --- rows of W against those of x

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
  template <int count>
  void put(int64_t m, int64_t n, const float* products) const {
    float* to = y + m * N + n;
    const float* from = residual ? residual + m * N + n : nullptr;
    CLEARHEAD_UNROLL
    for (int c = 0; c < count; c++) to[c] = scale ? to[c] * products[c] : from ? from[c] + products[c] : products[c];
  }
};

inline float dot(const Matrix& w, int64_t n, const Row& x) {
  const int64_t first = n * w.num_groups;
  const Groups groups{x.quants.data(), x.scales.data(), x.sums.data(), w.num_groups};
  const GroupScales scales{w.scales + first, w.offsets ? w.offsets + first : nullptr, float(-zero_of(w))};
  if (w.kind == EIGHT) return dot_eight((const uint8_t*)w.values + first * 32, scales, groups);
  return dot_four((const uint8_t*)w.values + first * 16, scales, groups);
}

// The processor looks ahead by itself, but less the busier the memory is: several rows far apart, left to it alone, took
// 8 ms for SmolLM2's weights in a quiet minute and 15 in a busy one; one after the other, and what comes so many bytes
// later sent for, they take 9 and 10.
constexpr int64_t LATER = 5120;

// Rows [first, last) of W.
inline void multiply(const Products& to, const Matrix& w, int64_t first, int64_t last, const Row* x, int64_t M) {
  const int64_t bytes = row_bytes(w);
  for (int64_t n = first; n < last; n++) {
    Ahead{(const char*)w.values + n * bytes + LATER, (bytes + 63) / 64}.send();
    for (int64_t m = 0; m < M; m++) {
      const float y = dot(w, n, x[m]) + (w.bias ? w.bias[n] : 0);
      to.put<1>(m, n, &y);
    }
  }
}

// The same of a plain W: `wide` rows of it meet all of x, in tiles of up to `tall` rows each, while later rows are sent for.
template <int tall, int wide, Vector (*add)(Vector, Words, Words)>
inline void multiply_tiles(const Products& to, const Matrix& w, int64_t first, int64_t last, const Rows& x, int64_t M) {
  const int64_t bytes = row_bytes(w), words = words_of(w), tiles = (M + tall - 1) / tall;
  const int64_t later = wide > 1 ? 2 * wide * bytes : LATER;
  for (int64_t n = first; n < last; n += wide) {
    const char *here = (const char*)w.values + n * bytes, *rows[wide];
    const int64_t columns = std::min<int64_t>(wide, last - n);
    float bias[wide] = {};
    for (int64_t c = 0; c < wide; c++) rows[c] = here + std::min(c, columns - 1) * bytes;
    for (int64_t c = 0; w.bias && c < columns; c++) bias[c] = w.bias[n + c];
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t m = M * tile / tiles, count = M * (tile + 1) / tiles - m;
      const int64_t sent = wide * tile / tiles, sending = wide * (tile + 1) / tiles - sent;
      float y[tall * wide];
      meet_up_to<tall, wide, add>(count, y, &x.words[m * words], words, rows, bytes, {here + later + sent * bytes, sending});
      for (int64_t r = 0; r < count; r++) {
        float* row = y + r * wide;
        for (int c = 0; c < wide; c++) row[c] += bias[c];
        if (columns == wide)
          to.put<wide>(m + r, n, row);
        else
          for (int64_t c = 0; c < columns; c++) to.put<1>(m + r, n + c, row + c);
      }
    }
  }
}

template <Vector (*add)(Vector, Words, Words)>
inline void multiply_plain(const Products& to, const Matrix& w, int64_t first, int64_t last, const Rows& x, int64_t M) {
  (M == 1 ? multiply_tiles<1, 1, add> : multiply_tiles<TILE_X, TILE_W, add>)(to, w, first, last, x, M);
}

inline void multiply(const Products& to, const Matrix& w, int64_t first, int64_t last, const Rows& x, int64_t M) {
  (w.kind == FULL ? multiply_plain<add_floats> : multiply_plain<add_halves>)(to, w, first, last, x, M);
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
template <class Ready>
inline void project(const Member& me, float* y, const Ready& x, int64_t M, const Matrix& w, Activation activation, bool gated,
                    const float* residual) {
  const int64_t N = w.N / (gated ? 2 : 1), shares = (N + SHARE - 1) / SHARE;
  const int64_t first = me.first(shares) * SHARE, last = std::min(N, me.last(shares) * SHARE);
  multiply({y, N, residual, false}, w, first, last, x, M);
  for (int64_t m = 0; m < M; m++) activate(y + m * N + first, last - first, activation);
  if (gated) multiply({y, N, nullptr, true}, rows_from(w, N), first, last, x, M);
}

inline void linear_packed(const Member& me, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                          Activation activation, bool gated, const float* residual) {
  thread_local std::vector<Row> rows;
  if (int64_t(rows.size()) < M) rows.resize(M);
  for (int64_t m = 0; m < M; m++) prepare(rows[m], x + m * w.K, w, norm);
  project(me, y, rows.data(), M, w, activation, gated, residual);
}

inline void linear_plain(const Member& me, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                         Activation activation, bool gated, const float* residual, Rows& shared) {
  thread_local Rows own;
  if (M <= FEW) {
    own.reserve(M, words_of(w));
    for (int64_t m = 0; m < M; m++) own.put(m, x + m * w.K, w, norm);
  } else {
    for (int64_t m = me.first(M); m < me.last(M); m++) shared.put(m, x + m * w.K, w, norm);
#pragma omp barrier
  }
  project(me, y, M <= FEW ? own : shared, M, w, activation, gated, residual);
}
