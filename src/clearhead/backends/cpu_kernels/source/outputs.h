// The part of a thread in the work of all, and what becomes of the products with W.
#pragma once
#include <omp.h>

#include "activations.h"
#include "tiles.h"

// One of the threads that run the same code in parallel, and its part of some work: items first to last - 1.
struct Thread {
  int64_t number = omp_get_thread_num(), count = omp_get_num_threads();
  int64_t first(int64_t total) const { return total * number / count; }
  int64_t last(int64_t total) const { return total * (number + 1) / count; }
};

// Up to this many rows of x, every thread converts all of them itself, which is cheaper than to wait for the others.
constexpr int64_t MAX_PRIVATE_ROWS = 8;

// What becomes of the products with W: y (M, N). gated: W holds the rows of the gate, then those of up, and
// y = activation(gate) * up. `residual` (M, N) may be null or y, and excludes an activation.
struct Output {
  float* y;
  int64_t N;
  const float* bias;
  Activation activation;
  bool gated;
  const float* residual;
  int64_t stride;  // of the rows of y and of the residual

  // Prefetch what `write` will change: with many rows, each of its lines is in another page of memory.
  void prefetch(int64_t m, int64_t count, int64_t n) const {
    for (int64_t r = m; r < m + count; r++)
      for (int64_t c = 0; c < PANEL; c += 16) __builtin_prefetch(y + r * stride + n + c, 1, 3);
  }

  // Write `count` rows from row m on and the columns [n, n + columns), from products (count, PANEL), which change.
  [[gnu::noinline]] void write(int64_t m, int64_t count, int64_t n, int64_t columns, float* products, float* up) const {
    for (int64_t r = 0; bias && r < count; r++) {
      for (int64_t c = 0; c < columns; c++) products[r * PANEL + c] += bias[n + c];
      for (int64_t c = 0; gated && c < columns; c++) up[r * PANEL + c] += bias[N + n + c];
    }
    if (gated && activation.limit > 0) clamp_gate(products, up, count * PANEL, activation);
    if (activation != IDENTITY) activate(products, count * PANEL, activation);
    for (int64_t r = 0; r < count; r++) {
      float *to = y + (m + r) * stride + n, *from = products + r * PANEL;
      const float *factor = up + r * PANEL, *added = residual ? residual + (m + r) * stride + n : nullptr;
      for (int64_t c = 0; gated && c < columns; c++) from[c] *= factor[c];
      for (int64_t c = 0; added && c < columns; c++) from[c] += added[c];
      std::copy(from, from + columns, to);
    }
  }
};
