// Number formats, and dot products of quantized groups: with AVX-512 instructions, or plain loops for other processors.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define CLEARHEAD_AVX512 1
#define CLEARHEAD_UNROLL _Pragma("GCC unroll 8")  // keeps the sums in registers
#include <immintrin.h>
#else
#define CLEARHEAD_UNROLL  // smaller registers cannot hold the sums anyway, and compiling would take a minute
#endif

inline float float_from_bits(uint32_t bits) {
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline float from_bfloat16(uint16_t x) { return float_from_bits(uint32_t(x) << 16); }

struct Bfloat16 {
  uint16_t bits;
};

inline uint16_t to_bfloat16(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float from_float16(uint16_t x) {
  const uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
  uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
  if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;
  if (exponent == 0) return (sign ? -1 : 1) * float(fraction) * 0x1p-24f;  // zero and subnormal numbers
  return float_from_bits(bits);
}

// Return e^x in plain arithmetic, so that the compiler can vectorize a loop of it: 2^n times a Taylor polynomial on
// [-ln 2 / 2, ln 2 / 2], with an error of 2e-7.
// It must be inlined: a loop that calls it is not vectorized, and attention over 8,000 slots took a third longer.
[[gnu::always_inline]] inline float exponential(float x) {
  x = x < -87 ? -87 : x > 88 ? 88 : x;
  const float n = __builtin_rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
  const float p = 1 + r * (1 + r * (0.5f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f))))));
  return p * float_from_bits(uint32_t(int32_t(n) + 127) << 23);
}

// Return the largest of `count` values. The compiler vectorizes the loop over 16 lanes; it could not vectorize one over
// `count` alone, because a maximum must not be reordered if there may be NaN.
inline float max_of(const float* x, int64_t count) {
  float lanes[16];
  for (int j = 0; j < 16; j++) lanes[j] = x[0];
  for (; count >= 16; x += 16, count -= 16)
    for (int j = 0; j < 16; j++) lanes[j] = lanes[j] < x[j] ? x[j] : lanes[j];
  for (int j = 0; j < count; j++) lanes[j] = lanes[j] < x[j] ? x[j] : lanes[j];
  for (int j = 1; j < 16; j++) lanes[0] = lanes[0] < lanes[j] ? lanes[j] : lanes[0];
  return lanes[0];
}

// A row of x, quantized in groups of 32 values.
struct QuantizedGroups {
  const int8_t* quants;
  const float *scales, *sums;  // padded to whole vectors; a sum is scale * sum of quants
  int64_t count;               // number of groups
};

// Scales of a row of W.
struct WeightScales {
  const uint16_t *scales, *offsets;  // float16; offsets may be null
  float zero;                        // without offsets, the offset of a group is zero * scale
};

#ifdef CLEARHEAD_AVX512

// Sum the products of all groups, 16 groups at a time. lanes: which scale belongs to each of the 16 partial sums of the
// first two groups. load(pair): the unsigned quants of W for a pair of groups.
template <class Load>
inline float dot_groups(const WeightScales& w, const QuantizedGroups& x, __m512i lanes, Load load) {
  __m512 sum = _mm512_setzero_ps();
  const __m512i two = _mm512_set1_epi32(2);
  for (int64_t g = 0; g < x.count; g += 16) {
    const int64_t left = x.count - g;
    const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
    auto floats = [&](const uint16_t* halves) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, halves + g)); };
    const __m512 scales = floats(w.scales), factors = _mm512_mul_ps(scales, _mm512_loadu_ps(x.scales + g));
    const __m512 offsets = w.offsets ? floats(w.offsets) : _mm512_mul_ps(scales, _mm512_set1_ps(w.zero));
    sum = _mm512_fmadd_ps(offsets, _mm512_loadu_ps(x.sums + g), sum);
    __m512i lane = lanes;
    auto add = [&](int64_t pair) {
      const __m512i quants = _mm512_loadu_si512(x.quants + pair * 64);
      const __m512 dots = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), load(pair), quants));
      sum = _mm512_fmadd_ps(dots, _mm512_permutexvar_ps(lane, factors), sum);
      lane = _mm512_add_epi32(lane, two);
    };
    if (left >= 16)
#pragma GCC unroll 8
      for (int pair = 0; pair < 8; pair++) add(g / 2 + pair);
    else
      for (int64_t pair = 0; pair < left / 2; pair++) add(g / 2 + pair);
  }
  return _mm512_reduce_add_ps(sum);
}

inline float dot_int8(const uint8_t* w, const WeightScales& scales, const QuantizedGroups& x) {
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  auto load = [&](int64_t pair) { return _mm512_xor_si512(_mm512_loadu_si512(w + pair * 64), sign); };
  return dot_groups(scales, x, lanes, load);
}

inline float dot_int4(const uint8_t* w, const WeightScales& scales, const QuantizedGroups& x) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1);
  return dot_groups(scales, x, lanes, [&](int64_t pair) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(w + pair * 32)));
    return _mm512_and_si512(_mm512_srlv_epi16(twice, shifts), nibble);
  });
}

#else

// Sum the products of all groups. product(g, j): value j of group g of W times that of x.
template <class Product>
inline float dot_groups(const WeightScales& w, const QuantizedGroups& x, Product product) {
  float sum = 0;
  for (int64_t g = 0; g < x.count; g++) {
    const float scale = from_float16(w.scales[g]);
    int dots = 0;
    for (int j = 0; j < 32; j++) dots += product(g, j);
    sum += dots * scale * x.scales[g] + (w.offsets ? from_float16(w.offsets[g]) : w.zero * scale) * x.sums[g];
  }
  return sum;
}

inline float dot_int8(const uint8_t* w, const WeightScales& scales, const QuantizedGroups& x) {
  return dot_groups(scales, x, [&](int64_t g, int j) { return int(w[g * 32 + j] ^ 0x80) * x.quants[g * 32 + j]; });
}

inline float dot_int4(const uint8_t* w, const WeightScales& scales, const QuantizedGroups& x) {
  return dot_groups(scales, x, [&](int64_t g, int j) {
    const int8_t* quants = x.quants + g / 2 * 64 + g % 2 * 16 + j / 16 * 32;
    return (w[g * 16 + j % 16] >> (j / 16 * 4) & 15) * quants[j % 16];
  });
}

#endif
