// Products of few rows of x with rows of W as they are stored. W is larger than the processor's caches, so the time is
// that of reading W once from memory; what is computed in between must take less. The order of sums is that of the
// panels (tiles.h): along K for floats; for integers a group is exact, and the groups are added along K.
#pragma once
#include "panels.h"

#ifdef CLEARHEAD_AVX512
constexpr int64_t MAX_FEW_ROWS = 8;

// Prefetch the rows that are read next, in the order of memory, 16 lines while 16 lines of these rows are multiplied. They
// may be in another matrix with longer or shorter rows. What is further ahead would leave the first-level cache before it
// is read, and what is less far ahead comes too late (benchmarks/log.md).
struct RowPrefetcher {
  static constexpr int64_t STEP = 16 * 64, MIN_BYTES = 8 * 1024;
  const char *next, *end;
  const char* last = std::max(next, end - STEP);

  [[gnu::always_inline]] void step() {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) __builtin_prefetch(next + i * 64, 0, 0);
    next = std::min(next + STEP, last);
  }
  void finish() {
    for (; next < end; next += 64) __builtin_prefetch(next, 0, 0);
  }

  // Return how many rows of W to prefetch: half a panel, or a whole one if its rows are short.
  static int64_t num_rows(const Matrix& w) { return 16 * row_bytes(w) < MIN_BYTES ? PANEL : 16; }
};

// Compute y (rows, 16, stride PANEL) for 16 rows of a plain W, which are `bytes` apart.
template <int rows, class WordFormat>
inline void multiply_stored(float* y, const uint32_t* x, int64_t stride, const char* w, int64_t bytes,
                            RowPrefetcher& prefetcher) {
  Vector sums[rows] = {};
  for (int64_t i = 0; i < bytes / 4; i += 16) {
    __m512i columns[16];
    load_transposed(columns, w + i * 4, bytes, bytes / 4 - i);
    prefetcher.step();
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++)
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++)
        sums[r] = WordFormat::add(sums[r], (Words)columns[j], broadcast(x[r * stride + i + j]));
  }
  for (int r = 0; r < rows; r++) std::memcpy(y + r * PANEL, &sums[r], sizeof(sums[r]));
}

// The same for quantized groups and several rows of x; `panel` holds the scales of the 16 rows.
template <int rows, WeightKind kind>
inline void multiply_stored_groups(float* y, const uint32_t* x, const BandScales& band, const char* w, int64_t bytes,
                                   const PanelScales& panel, int64_t num_groups, RowPrefetcher& prefetcher) {
  constexpr int words_per_group = kind == INT8 ? 8 : 4;
  const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(char(0x80));
  Vector sums[rows] = {};
  for (int64_t i = 0; i < bytes / 4; i += 16) {
    __m512i columns[16];
    load_transposed(columns, w + i * 4, bytes, bytes / 4 - i);
    prefetcher.step();
#pragma GCC unroll 8
    for (int first = 0; first < 16; first += words_per_group) {
      const int64_t g = (i + first) / words_per_group;
      if (g >= num_groups) break;
      Words dots[rows];
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) dots[r] = broadcast(uint32_t(band.initial_sums[r * num_groups + g]));
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        const __m512i column = columns[first + j % words_per_group];
        const __m512i bytes = kind == INT8 ? _mm512_xor_si512(column, sign)
                              : j < 4      ? _mm512_and_si512(column, nibble)
                                           : _mm512_and_si512(_mm512_srli_epi16(column, 4), nibble);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
          dots[r] = add_byte_products(dots[r], (Words)bytes, x[(r * num_groups + g) * 8 + j]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++)
        sums[r] = add_group(sums[r], dots[r], band, r * num_groups + g, panel.scales + g * PANEL,
                            panel.offsets ? panel.offsets + g * PANEL : nullptr);
    }
  }
  for (int r = 0; r < rows; r++) std::memcpy(y + r * PANEL, &sums[r], sizeof(sums[r]));
}

// Sum the four integers in each quarter of 16 vectors: quarter q of fours[i] then holds those of vectors 4i to 4i + 3.
[[gnu::always_inline]] inline void sum_quarters(__m512i (&fours)[4], const __m512i (&v)[16]) {
  auto pairs = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    const __m512i a = pairs(v[4 * i], v[4 * i + 1]), b = pairs(v[4 * i + 2], v[4 * i + 3]);
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
}

// The same for one row of x: instead of W, the sums of four products are transposed, which are fewer. A step takes 64
// bytes of each row: two groups in 8 bits, four in 4 bits.
template <WeightKind kind>
inline void multiply_stored_groups_by_one(float* y, const uint32_t* x, const BandScales& band, const char* w,
                                          int64_t bytes, const PanelScales& panel, RowPrefetcher& prefetcher) {
  const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(char(0x80)), zero = _mm512_setzero_si512();
  Vector sums = {};
  auto add = [&](int64_t g, __m512i dots) __attribute__((always_inline)) {
    const Words all = (Words)dots + broadcast(uint32_t(band.initial_sums[g]));
    sums = add_group(sums, all, band, g, panel.scales + g * PANEL, panel.offsets ? panel.offsets + g * PANEL : nullptr);
  };
  for (int64_t i = 0; i < bytes; i += 64) {
    const __mmask16 mask = first_words((bytes - i) / 4);
    __m512i dots[16], fours[4];
    prefetcher.step();
    if (kind == INT8) {
      const __m512i values = _mm512_loadu_si512(x + i / 4);
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++)
        dots[r] = _mm512_dpbusd_epi32(zero, _mm512_xor_si512(_mm512_loadu_si512(w + r * bytes + i), sign), values);
    } else {  // the first halves of four groups of x, and the second halves
      const __m512i left = _mm512_loadu_si512(x + i / 2);
      const __m512i right = mask == 0xffff ? _mm512_loadu_si512(x + i / 2 + 16) : zero;
      const __m512i first = _mm512_shuffle_i32x4(left, right, 0x88), second = _mm512_shuffle_i32x4(left, right, 0xdd);
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++) {
        const __m512i both = _mm512_maskz_loadu_epi32(mask, w + r * bytes + i);
        dots[r] = _mm512_dpbusd_epi32(zero, _mm512_and_si512(both, nibble), first);
        dots[r] = _mm512_dpbusd_epi32(dots[r], _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble), second);
      }
    }
    sum_quarters(fours, dots);
    const __m512i a = _mm512_shuffle_i32x4(fours[0], fours[1], 0x88), b = _mm512_shuffle_i32x4(fours[0], fours[1], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(fours[2], fours[3], 0x88), d = _mm512_shuffle_i32x4(fours[2], fours[3], 0xdd);
    if (kind == INT8) {  // a group is two quarters
      const __m512i left = _mm512_add_epi32(a, b), right = _mm512_add_epi32(c, d);
      add(i / 32, _mm512_shuffle_i32x4(left, right, 0x88));
      add(i / 32 + 1, _mm512_shuffle_i32x4(left, right, 0xdd));
    } else {
      add(i / 16, _mm512_shuffle_i32x4(a, c, 0x88));
      add(i / 16 + 1, _mm512_shuffle_i32x4(b, d, 0x88));
      if (mask != 0xffff) break;
      add(i / 16 + 2, _mm512_shuffle_i32x4(a, c, 0xdd));
      add(i / 16 + 3, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
  }
  std::memcpy(y, &sums, sizeof(sums));
}

// Return whether rows of W can be read as they are stored: a row of bfloat16 values must consist of whole words.
inline bool has_whole_words(const Matrix& w) { return w.kind != BFLOAT16 || w.K % 2 == 0; }

// Compute y (rows, PANEL) for rows [n, n + PANEL) of W, while the next ones are prefetched.
template <int rows = MAX_FEW_ROWS>
void multiply_few_rows(float* y, const InputRows& x, int64_t M, Panel& panel, const Matrix& w, int64_t n,
                       const PanelRows& next) {
  if constexpr (rows > 1)
    if (M < rows) return multiply_few_rows<rows - 1>(y, x, M, panel, w, n, next);
  const int64_t bytes = row_bytes(w), stride = words_per_row(w), G = w.num_groups;
  const BandScales band = band_scales(x, w);
  const char* from = (const char*)w.values + n * bytes;
  const uint32_t* words = x.words.data();
  RowPrefetcher second_half{from + 16 * bytes, from + PANEL * bytes}, following{from, from};
  if (next.w) following = {next.values(), next.values() + RowPrefetcher::num_rows(*next.w) * row_bytes(*next.w)};
  if (G) panel.fill_scales(w, n, PANEL);
  for (int64_t half = 0; half < PANEL; half += 16, y += 16, from += 16 * bytes) {
    RowPrefetcher& prefetcher = half == 0 && RowPrefetcher::num_rows(w) < PANEL ? second_half : following;
    const PanelScales scales = panel.scales_from(w, half);
    if (w.kind == FLOAT32)
      multiply_stored<rows, FloatWords>(y, words, stride, from, bytes, prefetcher);
    else if (w.kind == BFLOAT16)
      multiply_stored<rows, BfloatPairs>(y, words, stride, from, bytes, prefetcher);
    else if (rows == 1)
      (w.kind == INT8 ? multiply_stored_groups_by_one<INT8> : multiply_stored_groups_by_one<INT4>)(
          y, words, band, from, bytes, scales, prefetcher);
    else
      (w.kind == INT8 ? multiply_stored_groups<rows, INT8> : multiply_stored_groups<rows, INT4>)(
          y, words, band, from, bytes, scales, G, prefetcher);
  }
  following.finish();
}
#else
constexpr int64_t MAX_FEW_ROWS = 0;
#endif
