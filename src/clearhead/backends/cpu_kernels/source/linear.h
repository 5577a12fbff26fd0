// y = activation(W norm(x) + bias) + residual for any number of rows of x. The reference in PyTorch is
// PackedWeight.unpack and functional.linear. Shapes as in inputs.h.
//
//     rows of x                   with AVX-512                              otherwise
//     up to MAX_FEW_ROWS          rows of W as they are stored              plain W: one row after the other
//     more, if they fit into      plain W: x in panels, which stay there    8 bits, up to 16 rows: the same
//     the second-level cache      for all of W                              else W in panels
//     else, or W is quantized     W in panels, which stay in the cache
//                                 while all rows are multiplied
//
// With AVX-512, the bits of a row of y depend on nothing but the same row of x: not on the number of rows or threads.
#pragma once
#include "blocks.h"
#include "transposed_rows.h"

// Compute y (count, PANEL) = W x for the rows of W in the panel and rows [m, m + count) of x.
template <int rows = BAND>
void multiply_panel(float* y, const InputRows& x, int64_t m, int64_t count, const Panel& panel, const Matrix& w,
                    Prefetcher prefetcher) {
  if constexpr (rows > 1)
    if (count < rows) return multiply_panel<rows - 1>(y, x, m, count, panel, w, prefetcher);
  const int64_t stride = words_per_row(w);
  const uint32_t *xs = &x.words[m * stride], *words = panel.words.data();
  if (w.kind == FLOAT32)
    multiply_word_panel<rows, FloatWords>(y, xs, stride, words, w.K, prefetcher);
  else if (w.kind == BFLOAT16)
    multiply_word_panel<rows, BfloatPairs>(y, xs, stride, words, (w.K + 1) / 2, prefetcher);
  else
    (!has_halves(w) ? multiply_packed_panel<rows>
     : w.offsets    ? multiply_half_panel<rows, true>
                    : multiply_half_panel<rows, false>)(
        y, xs, band_scales(x, w, m), words, panel.scales_from(w, 0), w, prefetcher);
}

// Lines of the next panel that one step of the multiplication prefetches, so that two bands prefetch all of them.
inline Prefetcher next_panel(const Matrix& w, int64_t n, int64_t band, int64_t bands) {
  const int64_t bytes = PANEL * row_bytes(w), steps = w.num_groups ? w.num_groups : words_per_row(w);
  const int64_t parts = std::min<int64_t>(bands, 2), lines = (bytes / 64 + steps * parts - 1) / (steps * parts);
  const char* next = (const char*)w.values + (n + PANEL) * row_bytes(w);
  return {next + band * steps * lines * 64, band < parts ? lines : 0};
}

// Convert rows of x to the format of W: in `shared` by all threads, or a few rows in each thread.
inline const InputRows& convert_rows(const Thread& thread, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                                     InputRows& shared) {
  thread_local InputRows own;
  if (M > MAX_PRIVATE_ROWS) {
    for (int64_t m = thread.first(M); m < thread.last(M); m++) shared.set_row(m, x + m * w.K, w, norm);
#pragma omp barrier
    return shared;
  }
  own.reserve(M, words_per_row(w));
  for (int64_t m = 0; m < M; m++) own.set_row(m, x + m * w.K, w, norm);
  return own;
}

// What to compute of a gated product.
enum GatedPart { WHOLE, GATE, UP };

// Compute the columns [n, n + columns) of y with panels of W.
inline void multiply_in_panels(const Output& to, const InputRows& x, int64_t M, const Matrix& w, int64_t n,
                               int64_t columns) {
  thread_local Panel panel, up_panel;
  panel.fill(w, n, columns);
  if (to.gated) up_panel.fill(w, to.N + n, columns);
  const int64_t most = w.num_groups ? PACKED_BAND : BAND, bands = (M + most - 1) / most;
  for (int64_t band = 0; band < bands; band++) {
    const int64_t m = M * band / bands, count = M * (band + 1) / bands - m;
    alignas(64) float products[BAND * PANEL], up[BAND * PANEL];
    to.prefetch(m, count, n);
    multiply_panel(products, x, m, count, panel, w, next_panel(w, n, band, bands));
    if (to.gated) multiply_panel(up, x, m, count, up_panel, w, next_panel(w, to.N + n, band, bands));
    to.write(m, count, n, columns, products, up);
  }
}

#ifdef CLEARHEAD_AVX512
// The same for few rows of x and rows of W as they are stored, while the panel that is read next is prefetched. Of a
// gated product, the gate alone may be computed, which then waits in y, and later the rest.
inline void multiply_as_stored(const Output& to, const InputRows& x, int64_t M, const Matrix& w, int64_t n, int64_t,
                               const PanelRows& next, GatedPart part) {
  thread_local Panel panel;
  alignas(64) float products[MAX_FEW_ROWS * PANEL], up[MAX_FEW_ROWS * PANEL];
  auto multiply = [&](float* y, int64_t row, const PanelRows& next) {
    if (is_read_by_one(w)) return multiply_blocks(y, x, panel, w, row);
    multiply_few_rows(y, x, M, panel, w, row, next);
  };
  if (part == GATE) {
    multiply(products, n, next);
    for (int64_t m = 0; m < M; m++) std::copy_n(products + m * PANEL, PANEL, to.y + m * to.stride + n);
    return;
  }
  if (part == UP)
    for (int64_t m = 0; m < M; m++) std::copy_n(to.y + m * to.stride + n, PANEL, products + m * PANEL);
  else
    multiply(products, n, to.gated ? PanelRows{&w, to.N + n} : next);
  if (to.gated) multiply(up, to.N + n, next);
  to.write(0, M, n, PANEL, products, up);
}

inline bool runs_as_stored(int64_t M, const Matrix& w, int64_t columns) {
  return M <= (is_read_by_one(w) ? 1 : MAX_FEW_ROWS) && columns == PANEL && has_whole_words(w);
}
#else
// Smaller registers hold no tile of sums: one row of W after the other, in plain loops that the compiler vectorizes.
template <class WordFormat>
inline float dot_words(const uint32_t* x, const char* w, int64_t bytes) {
  float sum = 0;
  uint32_t word = 0;
  for (int64_t k = 0; k < bytes / 4; k++) {
    std::memcpy(&word, w + k * 4, 4);
    sum = WordFormat::add(sum, word, x[k]);
  }
  word = 0;
  std::memcpy(&word, w + bytes / 4 * 4, bytes % 4);
  return WordFormat::add(sum, word, bytes % 4 ? x[bytes / 4] : 0);
}

inline float dot_groups(const InputRows& x, int64_t m, const Matrix& w, int64_t n) {
  float sum = 0;
  for (int64_t g = 0; g < w.num_groups; g++) {
    const int64_t place = n * w.num_groups + g, group = m * w.num_groups + g;
    const int8_t *quants = (const int8_t*)&x.words[group * 8], *values = (const int8_t*)w.values + place * 32;
    int dots = 0;
    for (int j = 0; j < 32; j++) dots += int(values[j]) * quants[j];
    sum += dots * from_float16(w.scales[place]) * x.scales[group];
  }
  return sum;
}

inline void multiply_as_stored(const Output& to, const InputRows& x, int64_t M, const Matrix& w, int64_t n,
                               int64_t columns, const PanelRows&, GatedPart) {
  auto dot = [&](int64_t m, int64_t row) {
    const char* values = (const char*)w.values + row * row_bytes(w);
    const uint32_t* words = &x.words[m * words_per_row(w)];
    return w.num_groups          ? dot_groups(x, m, w, row)
           : w.kind == FLOAT32 ? dot_words<FloatWords>(words, values, row_bytes(w))
                               : dot_words<BfloatPairs>(words, values, row_bytes(w));
  };
  for (int64_t m = 0; m < M; m++) {
    float products[PANEL] = {}, up[PANEL] = {};
    for (int64_t c = 0; c < columns; c++) products[c] = dot(m, n + c);
    for (int64_t c = 0; to.gated && c < columns; c++) up[c] = dot(m, to.N + n + c);
    to.write(m, 1, n, columns, products, up);
  }
}

inline bool runs_as_stored(int64_t M, const Matrix& w, int64_t) {
  return w.kind == INT8 ? M <= 16 && !w.group_scales : w.num_groups == 0;
}
#endif

// A product that follows. Its first panel is prefetched at the end of the one before.
struct Following {
  const Matrix* w = nullptr;
  bool gated = false;

  // Return the first rows of W that a thread will read.
  PanelRows first_panel(const Thread& thread) const {
    const int64_t panels = w ? (w->N / (gated ? 2 : 1) + PANEL - 1) / PANEL : 0, first = thread.first(panels);
    return w && w->kind != PARTS && (first + 1) * PANEL <= w->N ? PanelRows{w, first * PANEL} : PanelRows{};
  }
};

// Compute y, whose rows are `stride` apart; called by all threads. `shared` holds the rows of x in the format of W if
// they are many.
inline void linear_part(const Thread& thread, float* y, int64_t stride, const float* x, int64_t M, const Matrix& w,
                        const Norm& norm, Activation activation, bool gated, const float* residual,
                        InputRows& shared, const Following& following) {
  const InputRows& rows = convert_rows(thread, x, M, w, norm, shared);
  const int64_t N = w.N / (gated ? 2 : 1), panels = (N + PANEL - 1) / PANEL;
  const Output to{y, N, w.bias, activation, gated, residual, stride};
  const int64_t first = thread.first(panels) * PANEL, last = std::min(N, thread.last(panels) * PANEL);
  const PanelRows after = following.first_panel(thread);
  const bool transposes = transposes_x(M, w);
  if (transposes) transpose_rows(thread, shared, M, w);
#ifdef CLEARHEAD_AVX512
  // All of the gate, then the rest: memory is read faster in order than from two places in turns.
  const bool in_order = gated && N % PANEL == 0 && runs_as_stored(M, w, PANEL);
  for (int64_t n = first; in_order && n < last; n += PANEL)
    multiply_as_stored(to, rows, M, w, n, PANEL, {&w, n + PANEL < last ? n + PANEL : N + first}, GATE);
#else
  const bool in_order = false;
#endif
  for (int64_t n = first; n < last; n += PANEL) {
    const int64_t columns = std::min(PANEL, N - n), next = (in_order ? N : 0) + n + PANEL;
    const PanelRows following_rows = n + 2 * PANEL <= last ? PanelRows{&w, next} : after;
    if (transposes && columns == PANEL)
      multiply_transposed(to, rows, M, w, n, following_rows.w ? following_rows.values() : nullptr);
    else if (!runs_as_stored(M, w, columns))
      multiply_in_panels(to, rows, M, w, n, columns);
    else
      multiply_as_stored(to, rows, M, w, n, columns, following_rows, in_order ? UP : WHOLE);
  }
#pragma omp barrier
}

// Compute y for a W that may consist of parts with different formats, which have neither activation nor residual.
inline void linear(const Thread& thread, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                   Activation activation, bool gated, const float* residual, InputRows& shared,
                   const Following& following = {}) {
  if (w.kind != PARTS)
    return linear_part(thread, y, w.N / (gated ? 2 : 1), x, M, w, norm, activation, gated, residual, shared, following);
  const Matrix* part = (const Matrix*)w.values;
  for (int64_t n = 0; n < w.N; n += part++->N)
    linear_part(thread, y + n, w.N, x, M, *part, norm, IDENTITY, false, nullptr, shared, {});
}
