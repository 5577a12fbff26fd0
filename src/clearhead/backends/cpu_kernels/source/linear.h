// y = W norm(x) + bias for a few rows of x. W is larger than the processor's caches, so the time is that of reading W
// once from memory; from about ten rows of x on, it is that of the multiplications. The reference in PyTorch is
// PackedWeight.unpack and functional.linear. Shapes as in inputs.h. The last bits of y depend on the number of rows.
#pragma once
#include <omp.h>

#include "inputs.h"
#include "tiles.h"

// One of the threads that run the same code in parallel, and its part of some work: items first to last - 1.
struct Thread {
  int64_t number = omp_get_thread_num(), count = omp_get_num_threads();
  int64_t first(int64_t total) const { return total * number / count; }
  int64_t last(int64_t total) const { return total * (number + 1) / count; }
};

// `linear` in kernels.cpp chooses by the kind of W and the number of rows of x:
//
//     rows of x                      quantized W                   plain W
//     up to max_stored_rows(w)       linear_packed, row by row     linear_plain, in tiles
//     more                           linear_panels (prompt.h)      linear_panels
#ifdef CLEARHEAD_AVX512
constexpr int64_t MAX_INT8_ROWS = 4, MAX_INT4_ROWS = 4, MAX_PLAIN_ROWS = 48;
#else
constexpr int64_t MAX_INT8_ROWS = 16, MAX_INT4_ROWS = 0, MAX_PLAIN_ROWS = INT64_MAX;
#endif
inline int64_t max_stored_rows(const Matrix& w) {
  return w.kind == INT8 ? MAX_INT8_ROWS : w.kind == INT4 ? MAX_INT4_ROWS : MAX_PLAIN_ROWS;
}

// Up to this many rows of x for a plain W, every thread converts all of them itself, which is cheaper than to wait for
// the others.
constexpr int64_t MAX_PRIVATE_ROWS = 16;
inline bool shares_rows(int64_t M, const Matrix& w) {
  return M > max_stored_rows(w) || (!w.num_groups && M > MAX_PRIVATE_ROWS);
}
constexpr int64_t ROWS_PER_SHARE = 16;  // threads divide the rows of W in shares of this size

// --- rows of W times rows of x

// Return W without its first n rows.
inline Matrix skip_rows(Matrix w, int64_t n) {
  w.N -= n;
  w.values = (const char*)w.values + n * row_bytes(w);
  w.scales += n * w.num_groups;
  if (w.offsets) w.offsets += n * w.num_groups;
  if (w.bias) w.bias += n;
  return w;
}

// Where to write products: y (M, N) = product + residual, which may be null or y; or with `scale`, y = y * product.
struct Output {
  float* y;
  int64_t N;
  const float* residual;
  bool scale;
  template <int count>
  void write(int64_t m, int64_t n, const float* products) const {
    float* to = y + m * N + n;
    const float* from = residual ? residual + m * N + n : nullptr;
    CLEARHEAD_UNROLL
    for (int c = 0; c < count; c++) to[c] = scale ? to[c] * products[c] : from ? from[c] + products[c] : products[c];
  }
};

inline float dot(const Matrix& w, int64_t n, const QuantizedRow& x) {
  const int64_t first = n * w.num_groups;
  const QuantizedGroups groups{x.quants.data(), x.scales.data(), x.sums.data(), w.num_groups};
  const WeightScales scales{w.scales + first, w.offsets ? w.offsets + first : nullptr, float(-zero_point(w))};
  if (w.kind == INT8) return dot_int8((const uint8_t*)w.values + first * 32, scales, groups);
  return dot_int4((const uint8_t*)w.values + first * 16, scales, groups);
}

// How many bytes ahead to prefetch. The processor prefetches by itself, but less so when the memory is busy: reading
// several rows that are far apart, without our own prefetching, took 8 ms for SmolLM2's weights on a quiet machine and
// 15 ms on a busy one; reading one row after another, with it, takes 9 and 10 ms.
constexpr int64_t PREFETCH_DISTANCE = 5120;

// Multiply rows [first, last) of a quantized W with all rows of x.
inline void multiply(const Output& to, const Matrix& w, int64_t first, int64_t last, const QuantizedRow* x, int64_t M) {
  const int64_t bytes = row_bytes(w);
  for (int64_t n = first; n < last; n++) {
    Prefetcher{(const char*)w.values + n * bytes + PREFETCH_DISTANCE, (bytes + 63) / 64}.step();
    for (int64_t m = 0; m < M; m++) {
      const float y = dot(w, n, x[m]) + (w.bias ? w.bias[n] : 0);
      to.write<1>(m, n, &y);
    }
  }
}

// The same for a plain W: `wide` of its rows are multiplied with tiles of up to `tall` rows of x, while later rows of W
// are prefetched.
template <int tall, int wide, class WordFormat>
inline void multiply_tiles(const Output& to, const Matrix& w, int64_t first, int64_t last, const InputRows& x,
                           int64_t M) {
  const int64_t bytes = row_bytes(w), words = words_per_row(w), tiles = (M + tall - 1) / tall;
  const int64_t distance = wide > 1 ? 2 * wide * bytes : PREFETCH_DISTANCE;
  for (int64_t n = first; n < last; n += wide) {
    const char *first_row = (const char*)w.values + n * bytes, *rows[wide];
    const int64_t columns = std::min<int64_t>(wide, last - n);
    float bias[wide] = {};
    for (int64_t c = 0; c < wide; c++) rows[c] = first_row + std::min(c, columns - 1) * bytes;
    for (int64_t c = 0; w.bias && c < columns; c++) bias[c] = w.bias[n + c];
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t m = M * tile / tiles, count = M * (tile + 1) / tiles - m;
      const int64_t prefetched = wide * tile / tiles, prefetching = wide * (tile + 1) / tiles - prefetched;
      float y[tall * wide];
      multiply_stored_up_to<tall, wide, WordFormat>(count, y, &x.words[m * words], words, rows, bytes,
                                                    {first_row + distance + prefetched * bytes, prefetching});
      for (int64_t r = 0; r < count; r++) {
        float* row = y + r * wide;
        for (int c = 0; c < wide; c++) row[c] += bias[c];
        if (columns == wide)
          to.write<wide>(m + r, n, row);
        else
          for (int64_t c = 0; c < columns; c++) to.write<1>(m + r, n + c, row + c);
      }
    }
  }
}

template <class WordFormat>
inline void multiply_plain(const Output& to, const Matrix& w, int64_t first, int64_t last, const InputRows& x,
                           int64_t M) {
  (M == 1 ? multiply_tiles<1, 1, WordFormat> : multiply_tiles<TILE_X, TILE_W, WordFormat>)(to, w, first, last, x, M);
}

inline void multiply(const Output& to, const Matrix& w, int64_t first, int64_t last, const InputRows& x, int64_t M) {
  (w.kind == FLOAT32 ? multiply_plain<FloatWords> : multiply_plain<BfloatPairs>)(to, w, first, last, x, M);
}

inline void activate(float* x, int64_t count, Activation activation) {
  for (int64_t i = 0; activation == RELU && i < count; i++) x[i] = x[i] > 0 ? x[i] : 0;
  for (int64_t i = 0; activation == GELU && i < count; i++) x[i] *= 0.5f * (1 + std::erf(x[i] * 0.70710678f));
  for (int64_t i = 0; activation == GELU_TANH && i < count; i++)
    x[i] -= x[i] / (1 + exponential(1.59576912f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
  for (int64_t i = 0; activation == SILU && i < count; i++) x[i] /= 1 + exponential(-x[i]);
}

// Compute this thread's part of y = activation(W x + bias) + residual. gated: W holds the rows of the gate, then those
// of up; y = activation(gate) * up. `residual` (M, N) may be null or y, and excludes an activation.
template <class PreparedRows>
inline void project(const Thread& thread, float* y, const PreparedRows& x, int64_t M, const Matrix& w,
                    Activation activation, bool gated, const float* residual) {
  const int64_t N = w.N / (gated ? 2 : 1), shares = (N + ROWS_PER_SHARE - 1) / ROWS_PER_SHARE;
  const int64_t first = thread.first(shares) * ROWS_PER_SHARE, last = std::min(N, thread.last(shares) * ROWS_PER_SHARE);
  multiply({y, N, residual, false}, w, first, last, x, M);
  for (int64_t m = 0; m < M; m++) activate(y + m * N + first, last - first, activation);
  if (gated) multiply({y, N, nullptr, true}, skip_rows(w, N), first, last, x, M);
}

// Compute y for a quantized W.
inline void linear_packed(const Thread& thread, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                          Activation activation, bool gated, const float* residual) {
  thread_local std::vector<QuantizedRow> rows;
  if (int64_t(rows.size()) < M) rows.resize(M);
  for (int64_t m = 0; m < M; m++) normalize_and_quantize(rows[m], x + m * w.K, w, norm);
  project(thread, y, rows.data(), M, w, activation, gated, residual);
}

// Compute y for a plain W. `shared` holds the rows of x if the threads convert them together.
inline void linear_plain(const Thread& thread, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                         Activation activation, bool gated, const float* residual, InputRows& shared) {
  thread_local InputRows own;
  InputRows& rows = shares_rows(M, w) ? shared : own;
  if (&rows == &shared) {
    for (int64_t m = thread.first(M); m < thread.last(M); m++) rows.set_row(m, x + m * w.K, w, norm);
#pragma omp barrier
  } else {
    rows.reserve(M, words_per_row(w));
    for (int64_t m = 0; m < M; m++) rows.set_row(m, x + m * w.K, w, norm);
  }
  project(thread, y, rows, M, w, activation, gated, residual);
}
