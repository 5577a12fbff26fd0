// Products of many rows of x with a plain W whose rows are read as they are stored: x is transposed instead of W.
//
// To transpose a panel of W takes as long as to multiply it by ten rows of x. The panels of x are transposed once and
// multiplied by all rows of W, but they have to stay in the second-level cache meanwhile, so there may not be too many.
// Words of x and of W change places in the multiplication, which gives the same bits (tiles.h).
#pragma once
#include "few_rows.h"
#include "outputs.h"

#ifdef CLEARHEAD_AVX512
inline int64_t num_panels(int64_t rows) { return (rows + PANEL - 1) / PANEL; }

inline bool transposes_x(int64_t M, const Matrix& w) {
  const int64_t rows = num_panels(M) * PANEL;
  return M > MAX_PRIVATE_ROWS && rows - M <= MAX_IDLE_ROWS && w.num_groups == 0 && has_whole_words(w) &&
         rows * words_per_row(w) * 4 <= MAX_TRANSPOSED_BYTES;
}

// Transpose x, whose rows are in the format of W; called by all threads.
inline void transpose_rows(const Thread& thread, InputRows& x, int64_t M, const Matrix& w) {
  const int64_t stride = words_per_row(w), blocks = stride / 16, tasks = num_panels(M) * blocks;
  for (int64_t task = thread.first(tasks); task < thread.last(tasks); task++) {
    const int64_t m = task / blocks * PANEL, word = task % blocks * 16;
    uint32_t* to = &x.transposed[m * stride + word * PANEL];
    for (int64_t r = 0; r < PANEL; r += 16)
      for_columns((const char*)&x.words[(m + r) * stride + word], stride * 4, M - m - r, 16,
                  [&](int c, Words column) { *(Words*)(to + c * PANEL + r) = column; });
  }
#pragma omp barrier
}

// Transpose products (PANEL rows of W, PANEL rows of x).
inline void transpose_products(float* to, const float* from) {
  for (int64_t n = 0; n < PANEL; n += 16)
    for (int64_t m = 0; m < PANEL; m += 16)
      for_columns((const char*)(from + n * PANEL + m), PANEL * 4, 16, 16,
                  [&](int c, Words column) { *(Words*)(to + (m + c) * PANEL + n) = column; });
}

// Compute y (panels, PANEL rows of W, PANEL rows of x), while the rows at `next` are prefetched.
inline void multiply_stored_rows(float* y, const InputRows& x, int64_t panels, const Matrix& w, int64_t n,
                                 const char* next) {
  const int64_t bytes = row_bytes(w), stride = words_per_row(w) * PANEL;
  const auto multiply = w.kind == FLOAT32 ? multiply_word_panel<BAND, FloatWords> : multiply_word_panel<BAND, BfloatPairs>;
  for (int64_t r = 0; r < PANEL; r += BAND) {
    const char* rows = (const char*)w.values + (n + r) * bytes;
    const char* prefetched = r + BAND < PANEL ? rows + BAND * bytes : next;
    for (int64_t p = 0; p < panels; p++)
      multiply(y + (p * PANEL + r) * PANEL, (const uint32_t*)rows, bytes / 4, &x.transposed[p * stride], bytes / 4,
               {prefetched, p == 0});
  }
}

// Compute the columns [n, n + PANEL) of y, while the rows of W that are read next are prefetched.
inline void multiply_transposed(const Output& to, const InputRows& x, int64_t M, const Matrix& w, int64_t n,
                                const char* next) {
  const int64_t panels = num_panels(M), size = panels * PANEL * PANEL;
  thread_local AlignedVector<float> sums;
  sums.resize(std::max<size_t>(sums.size(), 2 * size));
  float* up_sums = &sums[size];
  const char* up_rows = (const char*)w.values + (to.N + n) * row_bytes(w);
  multiply_stored_rows(sums.data(), x, panels, w, n, to.gated ? up_rows : next);
  if (to.gated) multiply_stored_rows(up_sums, x, panels, w, to.N + n, next);
  for (int64_t m = 0; m < M; m += PANEL) {
    alignas(64) float products[PANEL * PANEL], up[PANEL * PANEL];
    transpose_products(products, &sums[m * PANEL]);
    if (to.gated) transpose_products(up, up_sums + m * PANEL);
    to.write(m, std::min(PANEL, M - m), n, PANEL, products, up);
  }
}
#else
inline bool transposes_x(int64_t, const Matrix&) { return false; }
inline void transpose_rows(const Thread&, InputRows&, int64_t, const Matrix&) {}
inline void multiply_transposed(const Output&, const InputRows&, int64_t, const Matrix&, int64_t, const char*) {}
#endif
