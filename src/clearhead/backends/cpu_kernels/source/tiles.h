// Multiply a few rows of x with 16 or 32 rows of W while all sums stay in registers. Both consist of 32-bit words along
// K: one float, two bfloat16 or four 8-bit integers. A vector holds one word of 16 rows of W, and a word of x is
// multiplied with all of them:
//
//     panels        W was transposed (panels.h): any number of rows of x
//     stored rows   W is transposed in registers, or the sums are (integers): few rows of x, when reading W takes longer
//
// Both add the products of an output in the order of K, so its bits do not depend on how many rows x has.
#pragma once
#include "inputs.h"

// Rows of x and rows of W that are multiplied at a time.
#ifdef CLEARHEAD_AVX512
constexpr int64_t BAND = 8, PANEL = 32;
#else
constexpr int64_t BAND = 6, PANEL = 32;
#endif
constexpr int64_t PACKED_BAND = 6;  // of a quantized W: the two sums of each output of more rows would not stay there

// Vectors of 16 numbers, which the compiler maps to the registers of the processor. They may alias each other, since
// words of x and W may hold floats.
typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

inline Vector load(const float* x) { return *(const Vector*)x; }
inline Vector load(const Bfloat16* x) {
#ifdef CLEARHEAD_AVX512  // GCC 12 would convert each half and join them
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16);
#else
  return (Vector)(__builtin_convertvector(*(const Halves*)x, Words) << 16);
#endif
}

// Return the same number 16 times. Floats are handled as words: without AVX-512, GCC 12 would store a float to memory
// 16 times.
inline Words broadcast(uint32_t x) { return Words{} + x; }
inline Vector broadcast(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (Vector)broadcast(bits);
}

// Return sum + a * b. With AVX-512 it is rounded once, in every function: the compiler may not choose.
inline Vector fused_add(Vector sum, Vector a, Vector b) {
#ifdef CLEARHEAD_AVX512
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  return sum + a * b;
#endif
}

// Return a + b; the compiler may not reorder it. A fused_add with 1 would give the same bits, but some processors add
// beside their multiplications.
inline Vector ordered_add(Vector a, Vector b) {
#ifdef CLEARHEAD_AVX512
  Vector sum;
  asm("vaddps %2, %1, %0" : "=v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return a + b;
#endif
}

// Prevent the compiler from loading a vector again each time it is used. A processor that multiplies two vectors in a
// cycle also loads two, so that a second load for each product would take the time of the products.
template <class V>
inline void keep_in_register([[maybe_unused]] V& x) {
#ifdef CLEARHEAD_AVX512
  asm("" : "+v"(x));
#endif
}

// Return the sum of the 16 numbers of a vector.
inline float sum_of_lanes(Vector x) {
#ifdef CLEARHEAD_AVX512
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0;
  for (int j = 0; j < 16; j++) sum += x[j];
  return sum;
#endif
}

// Return the largest of the 16 numbers of a vector.
inline float largest_lane(Vector x) {
#ifdef CLEARHEAD_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  float largest = x[0];
  for (int j = 1; j < 16; j++) largest = largest < x[j] ? x[j] : largest;
  return largest;
#endif
}

// Add up the 16 numbers of each vector.
template <int count>
inline void sum_vectors(float* y, const Vector (&x)[count]) {
  for (int i = 0; i < count; i++) {
    y[i] = 0;
    for (int j = 0; j < 16; j++) y[i] += x[i][j];
  }
}

#ifdef CLEARHEAD_AVX512
// Four vectors at once take a third of the instructions.
inline void sum_vectors(float* y, const Vector (&x)[4]) {
  auto pairs = [](Vector a, Vector b) {  // sums of two numbers of a and of b, alternating
    return _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  };
  const __m512d left = _mm512_castps_pd(pairs(x[0], x[1])), right = _mm512_castps_pd(pairs(x[2], x[3]));
  const __m512 fours = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
  _mm_storeu_ps(y, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}
#endif

// --- products of words

// How to multiply words that hold one float each.
struct FloatWords {
  static Vector add(Vector sum, Words w, Words x) { return fused_add(sum, (Vector)w, (Vector)x); }
  static float add(float sum, uint32_t w, uint32_t x) { return sum + float_from_bits(w) * float_from_bits(x); }
};

// How to multiply words that hold two bfloat16 each.
struct BfloatPairs {
  static Vector add(Vector sum, Words w, Words x) {
#if defined(CLEARHEAD_AVX512) && defined(__AVX512BF16__)
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
    const Words high = broadcast(0xffff0000u);
    return fused_add(fused_add(sum, (Vector)(w << 16), (Vector)(x << 16)), (Vector)(w & high), (Vector)(x & high));
#endif
  }
  static float add(float sum, uint32_t w, uint32_t x) {
    return sum + float_from_bits(w << 16) * float_from_bits(x << 16) +
           float_from_bits(w & 0xffff0000u) * float_from_bits(x & 0xffff0000u);
  }
};

// Add the products of four bytes of w and x to each sum.
inline Words add_byte_products(Words sum, Words w, uint32_t x) {
#ifdef CLEARHEAD_AVX512
  return (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(int(x)));
#else
  for (int byte = 0; byte < 32; byte += 8)
    sum += (w >> byte & broadcast(255u)) * broadcast(uint32_t(int32_t(int8_t(x >> byte))));
  return sum;
#endif
}

typedef int32_t Integers __attribute__((vector_size(64), aligned(4)));

inline Vector to_floats(Words signed_sums) {
  return __builtin_convertvector((Integers)signed_sums, Vector);
}

// Prefetch what will be needed later, some cache lines of 64 bytes at each step, to the second-level cache.
struct Prefetcher {
  const char* next;
  int64_t lines;
  void step() {
    for (int64_t i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// Scales for groups of 32 integers, which are eight words. The integers of W are unsigned, those of x signed.
struct PanelScales {
  const float *scales, *offsets;             // (K/32, PANEL); offsets may be null
  const int32_t *half_scales, *half_offsets;  // (2 K/32, PANEL), of half groups (blocks.h)
};

struct BandScales {
  const int32_t* initial_sums;  // (rows, K/32 or 2 K/32): the value with which the sum of a group or half group begins
  const float *scales, *sums;   // (rows, K/32): the sums of x are needed for offsets
  const int32_t* half_sums;     // (rows, 2 K/32)
};

// Return the scales of rows of x from row m on, in the format of W.
inline BandScales band_scales(const InputRows& x, const Matrix& w, int64_t m = 0) {
  const int64_t place = m * w.num_groups;
  return {&x.initial_sums[has_halves(w) ? 2 * place : place], &x.scales[place], &x.sums[place],
          &x.half_sums[2 * place]};
}

// Add group g of row r, whose integer products are `dots`, to the sums of 16 outputs.
inline Vector add_group(Vector sum, Words dots, const BandScales& band, int64_t place, const float* scales,
                        const float* offsets) {
  sum = fused_add(sum, to_floats(dots) * load(scales), broadcast(band.scales[place]));
  return offsets ? fused_add(sum, load(offsets), broadcast(band.sums[place])) : sum;
}

// --- W in panels

template <int rows>
inline void store_sums(float* y, int64_t stride, const Vector (&sums)[rows][2]) {
  for (int r = 0; r < rows; r++) std::memcpy(y + r * stride, sums[r], sizeof(sums[r]));
}

// y (rows, PANEL) = x (rows, K) times a panel of floats or bfloat16 values (K, PANEL).
template <int rows, class Element>
inline void multiply_float_panel(float* y, int64_t y_stride, const float* x, int64_t x_stride, const Element* w,
                                 int64_t w_stride, int64_t K) {
  Vector sums[rows][2] = {};
  for (int64_t k = 0; k < K; k++) {
    const Vector left = load(w + k * w_stride), right = load(w + k * w_stride + 16);
    CLEARHEAD_UNROLL
    for (int r = 0; r < rows; r++) {
      const Vector one = broadcast(x[r * x_stride + k]);
      sums[r][0] = fused_add(sums[r][0], left, one);
      sums[r][1] = fused_add(sums[r][1], right, one);
    }
  }
  store_sums(y, y_stride, sums);
}

// The same for words of x and of the panel (words, PANEL), while up to two lines are prefetched at each step.
template <int rows, class WordFormat>
inline void multiply_word_panel(float* y, const uint32_t* x, int64_t x_stride, const uint32_t* w, int64_t num_words,
                                Prefetcher prefetcher) {
  Vector sums[rows][2] = {};
  // A loop over the lines in this loop would take 5 % of the time.
  const int64_t second = prefetcher.lines > 1 ? 64 : 0, stride = prefetcher.lines * 64;
  for (int64_t k = 0; k < num_words; k++) {
    __builtin_prefetch(prefetcher.next + k * stride, 0, 2);
    __builtin_prefetch(prefetcher.next + k * stride + second, 0, 2);
    const Words left = *(const Words*)(w + k * PANEL), right = *(const Words*)(w + k * PANEL + 16);
    CLEARHEAD_UNROLL
    for (int r = 0; r < rows; r++) {
      const Words word = broadcast(x[r * x_stride + k]);
      sums[r][0] = WordFormat::add(sums[r][0], left, word);
      sums[r][1] = WordFormat::add(sums[r][1], right, word);
    }
  }
  store_sums(y, PANEL, sums);
}

// The same for quantized groups; the prefetcher steps once per group.
template <int rows>
inline void multiply_packed_panel(float* y, const uint32_t* x, const BandScales& band, const uint32_t* w,
                                  const PanelScales& panel, const Matrix& matrix, Prefetcher prefetcher) {
  const int64_t num_groups = matrix.num_groups;
  Vector sums[rows][2] = {};
  for (int64_t g = 0; g < num_groups; g++) {
    Words dots[rows][2];
    for (int r = 0; r < rows; r++) dots[r][0] = dots[r][1] = broadcast(uint32_t(band.initial_sums[r * num_groups + g]));
    CLEARHEAD_UNROLL
    for (int j = 0; j < 8; j++) {
      const uint32_t* words = w + (g * 8 + j) * PANEL;
      const Words left = *(const Words*)words, right = *(const Words*)(words + 16);
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++) {
        dots[r][0] = add_byte_products(dots[r][0], left, x[(r * num_groups + g) * 8 + j]);
        dots[r][1] = add_byte_products(dots[r][1], right, x[(r * num_groups + g) * 8 + j]);
      }
    }
    CLEARHEAD_UNROLL
    for (int half = 0; half < 2; half++) {
      const int64_t place = g * PANEL + half * 16;
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++)
        sums[r][half] = add_group(sums[r][half], dots[r][half], band, r * num_groups + g, panel.scales + place,
                                  panel.offsets ? panel.offsets + place : nullptr);
    }
    prefetcher.step();
  }
  store_sums(y, PANEL, sums);
}
