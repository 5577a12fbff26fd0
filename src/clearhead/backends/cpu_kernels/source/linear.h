// y = W norm(x) + bias, for a W too large for the processor's cache: what counts is to read W once, at the speed of the
// memory; with ten rows of x and more, to multiply in every cycle. Twin in PyTorch: packed.py and F.linear. Shapes as in
// rows.h. The last bits of y depend on how many rows there are.
#pragma once
#include <omp.h>

#include "inputs.h"
#include "tiles.h"

// One of the threads that run the same code side by side.
struct Member {
  int64_t number = omp_get_thread_num(), count = omp_get_num_threads();
  int64_t first(int64_t total) const { return total * number / count; }
  int64_t last(int64_t total) const { return total * (number + 1) / count; }
};

// Numbers of rows of x. So many meet a quantised W one by one, and so many a plain W as it is stored; more of them meet
// panels (prompt.h).
#ifdef CLEARHEAD_VECTORS
constexpr int64_t ALONE_BY_EIGHT = 4, ALONE_BY_FOUR = 4, TILED = 48;
#else
constexpr int64_t ALONE_BY_EIGHT = 16, ALONE_BY_FOUR = 0, TILED = INT64_MAX;
#endif
inline int64_t most_rows(const Matrix& w) {
  return w.kind == EIGHT ? ALONE_BY_EIGHT : w.kind == FOUR ? ALONE_BY_FOUR : TILED;
}

// So many rows for a plain W every thread makes ready by itself, which is cheaper than to wait for others.
constexpr int64_t FEW = 16;
inline bool shares_rows(int64_t M, const Matrix& w) { return M > most_rows(w) || (!w.num_groups && M > FEW); }
constexpr int64_t SHARE = 16;  // rows of W: what threads divide among themselves

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
template <int tall, int wide, class Numbers>
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
      meet_up_to<tall, wide, Numbers>(count, y, &x.words[m * words], words, rows, bytes, {here + later + sent * bytes, sending});
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

template <class Numbers>
inline void multiply_plain(const Products& to, const Matrix& w, int64_t first, int64_t last, const Rows& x, int64_t M) {
  (M == 1 ? multiply_tiles<1, 1, Numbers> : multiply_tiles<TILE_X, TILE_W, Numbers>)(to, w, first, last, x, M);
}

inline void multiply(const Products& to, const Matrix& w, int64_t first, int64_t last, const Rows& x, int64_t M) {
  (w.kind == FULL ? multiply_plain<Floats> : multiply_plain<Pairs>)(to, w, first, last, x, M);
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
  Rows& rows = shares_rows(M, w) ? shared : own;
  if (&rows == &shared) {
    for (int64_t m = me.first(M); m < me.last(M); m++) rows.put(m, x + m * w.K, w, norm);
#pragma omp barrier
  } else {
    rows.reserve(M, words_of(w));
    for (int64_t m = 0; m < M; m++) rows.put(m, x + m * w.K, w, norm);
  }
  project(me, y, rows, M, w, activation, gated, residual);
}
