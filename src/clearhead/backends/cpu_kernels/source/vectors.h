// Number formats, the exponential function, and whether the processor has AVX-512.
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
