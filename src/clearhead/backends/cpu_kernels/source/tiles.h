// Some rows of x meet some rows of W while all their sums stay in registers. Both come in words of 32 bits along K: one
// float, two bfloat16 or four 8-bit integers, those of x row after row. W comes in one of two ways:
//
//     as it is stored, TILE_W rows at a time     a vector holds 16 words of a row; at the end 16 sums become one
//     in panels, (words, PANEL)                  a vector holds a word of 16 rows: nothing to add up at the end, for which
//                                                W is laid out anew, worth it where many rows of x meet it
#pragma once
#include "vectors.h"

// 12 sums of integers and 12 of floats: with six rows and two vectors they just fit into 32 registers.
constexpr int64_t BAND = 6, PANEL = 32;

// What the compiler makes fit the processor: 16 numbers each. Floats may lie in words too: those of x and W do.
typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

inline Vector load(const float* x) { return *(const Vector*)x; }
inline Vector load(const Bfloat16* x) { return (Vector)(__builtin_convertvector(*(const Halves*)x, Words) << 16); }

// The same number 16 times. As a word: without large registers GCC 12 would write a float into memory 16 times.
inline Words all(uint32_t x) { return Words{} + x; }
inline Vector all(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (Vector)all(bits);
}

template <int count>
inline void totals(float* y, const Vector (&x)[count]) {
  for (int i = 0; i < count; i++) {
    y[i] = 0;
    for (int j = 0; j < 16; j++) y[i] += x[i][j];
  }
}

#ifdef CLEARHEAD_VECTORS
// Four at once take a third of the instructions.
inline void totals(float* y, const Vector (&x)[4]) {
  auto pairs = [](Vector a, Vector b) {  // a's and b's numbers in turns, each the sum of two
    return _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  };
  const __m512d left = _mm512_castps_pd(pairs(x[0], x[1])), right = _mm512_castps_pd(pairs(x[2], x[3]));
  const __m512 fours = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
  _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}
#endif

// --- rows as they are stored

// Words of floats, and of two bfloat16 each.
struct Floats {
  static Vector add(Vector sum, Words w, Words x) { return sum + (Vector)w * (Vector)x; }
  static float add(float sum, uint32_t w, uint32_t x) { return sum + as_float(w) * as_float(x); }
};

struct Pairs {
  static Vector add(Vector sum, Words w, Words x) {
#if defined(CLEARHEAD_VECTORS) && defined(__AVX512BF16__)
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
    return sum + (Vector)(w << 16) * (Vector)(x << 16) + (Vector)(w & 0xffff0000u) * (Vector)(x & 0xffff0000u);
#endif
  }
  static float add(float sum, uint32_t w, uint32_t x) {
    return sum + as_float(w << 16) * as_float(x << 16) + as_float(w & 0xffff0000u) * as_float(x & 0xffff0000u);
  }
};

// What will be needed is sent for meanwhile, some lines of 64 bytes at each step.
struct Ahead {
  const char* next;
  int64_t lines;
  void send() {
    for (int64_t i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);  // to the second-level cache
  }
};

// y (rows, columns); a row of W takes `bytes`, and those of x, `stride` words apart, end with zeros up to a whole vector.
#ifdef CLEARHEAD_VECTORS
constexpr int TILE_X = 6, TILE_W = 4;  // 24 sums, and four vectors of W

template <int rows, int columns, class Numbers>
inline void meet_rows(float* y, const uint32_t* x, int64_t stride, const char* const (&w)[columns], int64_t bytes, Ahead ahead) {
  Vector sums[rows][columns] = {};
  auto add_step = [&](int64_t byte, const Words(&ws)[columns]) __attribute__((always_inline)) {
    CLEARHEAD_UNROLL
    for (int r = 0; r < rows; r++) {
      const Words xs = *(const Words*)(x + r * stride + byte / 4);
      CLEARHEAD_UNROLL
      for (int c = 0; c < columns; c++) sums[r][c] = Numbers::add(sums[r][c], ws[c], xs);
    }
  };
  int64_t byte = 0;
  for (; byte + 64 <= bytes; byte += 64) {
    Words ws[columns];
    CLEARHEAD_UNROLL
    for (int c = 0; c < columns; c++) ws[c] = *(const Words*)(w[c] + byte);
    add_step(byte, ws);
    ahead.send();
  }
  if (byte < bytes) {
    Words ws[columns] = {};
    for (int c = 0; c < columns; c++) std::memcpy(&ws[c], w[c] + byte, bytes - byte);
    add_step(byte, ws);
  }
  for (int r = 0; r < rows; r++) totals(y + r * columns, sums[r]);
  // Sums may be reordered (cpu.py), but not with what is added to y later: beside a bias of -10,000 they would lose digits.
  asm volatile("" : : "r"(y) : "memory");
}
#else
constexpr int TILE_X = 1, TILE_W = 1;  // smaller registers hold no tile of such vectors; a plain loop is left to the compiler

template <int rows, int columns, class Numbers>
inline void meet_rows(float* y, const uint32_t* x, int64_t, const char* const (&w)[columns], int64_t bytes, Ahead) {
  static_assert(rows == 1 && columns == 1);
  float sum = 0;
  uint32_t word = 0;
  for (int64_t k = 0; k < bytes / 4; k++) {
    std::memcpy(&word, w[0] + k * 4, 4);
    sum = Numbers::add(sum, word, x[k]);
  }
  word = 0;
  std::memcpy(&word, w[0] + bytes / 4 * 4, bytes % 4);
  *y = Numbers::add(sum, word, bytes % 4 ? x[bytes / 4] : 0);
}
#endif

// The same for a number of rows that is known only here.
template <int rows, int columns, class Numbers>
inline void meet_up_to(int64_t count, float* y, const uint32_t* x, int64_t stride, const char* const (&w)[columns],
                       int64_t bytes, Ahead ahead) {
  if (count == rows) return meet_rows<rows, columns, Numbers>(y, x, stride, w, bytes, ahead);
  if constexpr (rows > 1) meet_up_to<rows - 1, columns, Numbers>(count, y, x, stride, w, bytes, ahead);
}

// --- panels

template <int rows>
inline void put(float* y, int64_t stride, const Vector (&sums)[rows][2]) {
  for (int r = 0; r < rows; r++) std::memcpy(y + r * stride, sums[r], sizeof(sums[r]));
}

template <int rows, class Element>
inline void meet_floats(float* y, int64_t y_stride, const float* x, int64_t x_stride, const Element* w, int64_t w_stride,
                        int64_t K) {
  Vector sums[rows][2] = {};
  for (int64_t k = 0; k < K; k++) {
    const Vector left = load(w + k * w_stride), right = load(w + k * w_stride + 16);
    CLEARHEAD_UNROLL
    for (int r = 0; r < rows; r++) {
      const Vector one = all(x[r * x_stride + k]);
      sums[r][0] += left * one;
      sums[r][1] += right * one;
    }
  }
  put(y, y_stride, sums);
}

template <int rows>
inline void meet_halves(float* y, const uint32_t* x, int64_t x_stride, const uint32_t* w, int64_t num_words) {
  Vector sums[rows][2] = {};
  for (int64_t k = 0; k < num_words; k++) {
    const Words left = *(const Words*)(w + k * PANEL), right = *(const Words*)(w + k * PANEL + 16);
    CLEARHEAD_UNROLL
    for (int r = 0; r < rows; r++) {
      const Words pair = all(x[r * x_stride + k]);
      sums[r][0] = Pairs::add(sums[r][0], left, pair);
      sums[r][1] = Pairs::add(sums[r][1], right, pair);
    }
  }
  put(y, PANEL, sums);
}

// Groups of 32 integers, that is eight words, each with its scales; W's are unsigned and x's signed.
struct PanelScales {
  const float *scales, *offsets;  // (K/32, PANEL); offsets may be null
};

struct BandScales {
  const int32_t* start;        // (rows, K/32): the sum with which a group begins
  const float *scales, *sums;  // (rows, K/32): sums of x, for offsets
};

inline Words add_fours(Words sum, Words w, uint32_t x) {
#ifdef CLEARHEAD_VECTORS
  return (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(int(x)));
#else
  for (int byte = 0; byte < 32; byte += 8) sum += (w >> byte & all(255u)) * all(uint32_t(int32_t(int8_t(x >> byte))));
  return sum;
#endif
}

inline Vector as_floats(Words signed_sums) {
  typedef int32_t Integers __attribute__((vector_size(64), aligned(4)));
  return __builtin_convertvector((Integers)signed_sums, Vector);
}

template <int rows>
inline void meet_groups(float* y, const uint32_t* x, const BandScales& band, const uint32_t* w, const PanelScales& panel,
                        int64_t num_groups) {
  Vector sums[rows][2] = {};
  for (int64_t g = 0; g < num_groups; g++) {
    Words dots[rows][2];
    for (int r = 0; r < rows; r++) dots[r][0] = dots[r][1] = all(uint32_t(band.start[r * num_groups + g]));
    CLEARHEAD_UNROLL
    for (int j = 0; j < 8; j++) {
      const uint32_t* here = w + (g * 8 + j) * PANEL;
      const Words left = *(const Words*)here, right = *(const Words*)(here + 16);
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++) {
        dots[r][0] = add_fours(dots[r][0], left, x[(r * num_groups + g) * 8 + j]);
        dots[r][1] = add_fours(dots[r][1], right, x[(r * num_groups + g) * 8 + j]);
      }
    }
    CLEARHEAD_UNROLL
    for (int half = 0; half < 2; half++) {
      const Vector scales = load(panel.scales + g * PANEL + half * 16);
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++)
        sums[r][half] += as_floats(dots[r][half]) * scales * all(band.scales[r * num_groups + g]);
      if (!panel.offsets) continue;
      const Vector offsets = load(panel.offsets + g * PANEL + half * 16);
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++) sums[r][half] += offsets * all(band.sums[r * num_groups + g]);
    }
  }
  put(y, PANEL, sums);
}
