// Dot products in the widest vectors of this processor, each with a plain loop where it has none.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define CLEARHEAD_VECTORS 1
#include <immintrin.h>
#endif

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

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
  float y;
  std::memcpy(&y, &bits, 4);
  if (exponent == 0) y = (sign ? -1 : 1) * float(fraction) * 0x1p-24f;  // zero and the smallest numbers
  return y;
}

// e^x in plain arithmetic, so that a loop of them becomes vectors: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2],
// right to 2e-7. Coefficients: Taylor's, the range is small enough.
inline float exponential(float x) {
  x = x < -87 ? -87 : x > 88 ? 88 : x;
  const float n = __builtin_rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
  const float p = 1 + r * (1 + r * (0.5f + r * (1 / 6.f + r * (1 / 24.f + r * (1 / 120.f + r * (1 / 720.f))))));
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

// The loop over 16 lanes becomes vectors, which one over `count` alone does not: a maximum must not be reordered where
// there may be NaN.
inline float largest_of(const float* x, int64_t count) {
  float lanes[16];
  for (int j = 0; j < 16; j++) lanes[j] = x[0];
  for (; count >= 16; x += 16, count -= 16)
    for (int j = 0; j < 16; j++) lanes[j] = lanes[j] < x[j] ? x[j] : lanes[j];
  for (int j = 0; j < count; j++) lanes[j] = lanes[j] < x[j] ? x[j] : lanes[j];
  for (int j = 1; j < 16; j++) lanes[0] = lanes[0] < lanes[j] ? lanes[j] : lanes[0];
  return lanes[0];
}

struct Groups {
  const int8_t* quants;
  const int32_t* start;
  const float* scales;
  int64_t count;  // of 32 values
};

#ifdef CLEARHEAD_VECTORS

template <int rows>
inline void dot_full(float* y, const float* w, const float* x, int64_t K) {
  __m512 sum[rows];
  for (auto& s : sum) s = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 16) {
    const __mmask16 mask = K - k >= 16 ? 0xffff : (1u << (K - k)) - 1;
    const __m512 xs = _mm512_maskz_loadu_ps(mask, x + k);
    for (int r = 0; r < rows; r++) {
      sum[r] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, w + r * K + k), xs, sum[r]);
    }
  }
  for (int r = 0; r < rows; r++) y[r] = _mm512_reduce_add_ps(sum[r]);
}

inline __m512 widen(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }

template <int rows>
inline void dot_half(float* y, const uint16_t* w, const uint16_t* x, int64_t K) {
  __m512 sum[rows];
  for (auto& s : sum) s = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 32) {
    const __mmask32 mask = K - k >= 32 ? 0xffffffff : (1u << (K - k)) - 1;
    const __m512i xs = _mm512_maskz_loadu_epi16(mask, x + k);
    for (int r = 0; r < rows; r++) {
      const __m512i ws = _mm512_maskz_loadu_epi16(mask, w + r * K + k);
#ifdef __AVX512BF16__
      sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)ws, (__m512bh)xs);
#else
      sum[r] = _mm512_fmadd_ps(widen(_mm512_castsi512_si256(ws)), widen(_mm512_castsi512_si256(xs)), sum[r]);
      sum[r] = _mm512_fmadd_ps(widen(_mm512_extracti64x4_epi64(ws, 1)), widen(_mm512_extracti64x4_epi64(xs, 1)), sum[r]);
#endif
    }
  }
  for (int r = 0; r < rows; r++) y[r] = _mm512_reduce_add_ps(sum[r]);
}

// 16 float16 scales at a time; `lanes` says which of them each of the 16 sums of the first two groups takes.
template <int rows, class Load>
inline void dot_groups(float* y, const uint16_t* scales, const Groups& x, __m512i lanes, Load load) {
  __m512 sum[rows], scale[rows];
  for (auto& s : sum) s = _mm512_setzero_ps();
  const __m512i two = _mm512_set1_epi32(2);
  __m512i lane = lanes;
  for (int64_t pair = 0; pair < x.count / 2; pair++) {
    if (pair % 8 == 0) {
      const int64_t left = x.count - pair * 2;
      const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
      for (int r = 0; r < rows; r++)
        scale[r] = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales + r * x.count + pair * 2));
      lane = lanes;
    }
    const __m512i quants = _mm512_loadu_si512(x.quants + pair * 64), start = _mm512_loadu_si512(x.start + pair * 16);
    const __m512 factor = _mm512_loadu_ps(x.scales + pair * 16);
    for (int r = 0; r < rows; r++) {
      const __m512 dots = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, load(r, pair), quants));
      sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(dots, factor), _mm512_permutexvar_ps(lane, scale[r]), sum[r]);
    }
    lane = _mm512_add_epi32(lane, two);
  }
  for (int r = 0; r < rows; r++) y[r] = _mm512_reduce_add_ps(sum[r]);
}

template <int rows>
inline void dot_eight(float* y, const uint8_t* w, const uint16_t* scales, const Groups& x) {
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  dot_groups<rows>(y, scales, x, lanes, [&](int r, int64_t pair) {
    const uint8_t* here = w + r * x.count * 32 + pair * 64;
    return _mm512_xor_si512(_mm512_loadu_si512(here), sign);
  });
}

template <int rows>
inline void dot_four(float* y, const uint8_t* w, const uint16_t* scales, const Groups& x) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1);
  dot_groups<rows>(y, scales, x, lanes, [&](int r, int64_t pair) {
    const uint8_t* here = w + r * x.count * 16 + pair * 32;
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)here);
    const __m256i low = _mm256_and_si256(bytes, nibble), high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  });
}

inline float dot_float16(const uint16_t* w, const float* x, int64_t count) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; k += 16) {
    const __mmask16 mask = count - k >= 16 ? 0xffff : (1u << (count - k)) - 1;
    const __m512 ws = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, w + k));
    sum = _mm512_fmadd_ps(ws, _mm512_maskz_loadu_ps(mask, x + k), sum);
  }
  return _mm512_reduce_add_ps(sum);
}

#else

template <int rows>
inline void dot_full(float* y, const float* w, const float* x, int64_t K) {
  for (int r = 0; r < rows; r++) {
    y[r] = 0;
    for (int64_t k = 0; k < K; k++) y[r] += w[r * K + k] * x[k];
  }
}

template <int rows>
inline void dot_half(float* y, const uint16_t* w, const uint16_t* x, int64_t K) {
  for (int r = 0; r < rows; r++) {
    y[r] = 0;
    for (int64_t k = 0; k < K; k++) y[r] += from_bfloat16(w[r * K + k]) * from_bfloat16(x[k]);
  }
}

// `load(r, pair, j)`: the value of W that meets quant j of these two groups; `group(j)`: 0 or 1.
template <int rows, class Load, class Group>
inline void dot_groups(float* y, const uint16_t* scales, const Groups& x, Load load, Group group) {
  for (int r = 0; r < rows; r++) {
    y[r] = 0;
    for (int64_t pair = 0; pair < x.count / 2; pair++) {
      int sums[2] = {0, 0};
      for (int j = 0; j < 64; j++) sums[group(j)] += load(r, pair, j) * x.quants[pair * 64 + j];
      for (int j = 0; j < 16; j++) sums[group(j * 4)] += x.start[pair * 16 + j];
      for (int g = 0; g < 2; g++)
        y[r] += sums[g] * from_float16(scales[r * x.count + pair * 2 + g]) * x.scales[pair * 16 + (g ? 15 : 0)];
    }
  }
}

template <int rows>
inline void dot_eight(float* y, const uint8_t* w, const uint16_t* scales, const Groups& x) {
  auto load = [&](int r, int64_t pair, int j) { return int(w[r * x.count * 32 + pair * 64 + j] ^ 0x80); };
  dot_groups<rows>(y, scales, x, load, [](int j) { return j / 32; });
}

template <int rows>
inline void dot_four(float* y, const uint8_t* w, const uint16_t* scales, const Groups& x) {
  auto load = [&](int r, int64_t pair, int j) {
    return w[r * x.count * 16 + pair * 32 + j % 32] >> (j / 32 * 4) & 15;
  };
  dot_groups<rows>(y, scales, x, load, [](int j) { return j / 16 % 2; });
}

inline float dot_float16(const uint16_t* w, const float* x, int64_t count) {
  float sum = 0;
  for (int64_t k = 0; k < count; k++) sum += from_float16(w[k]) * x[k];
  return sum;
}

#endif
