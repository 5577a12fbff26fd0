// The inputs of a product: W as it is stored, a norm, and rows of x in the number format of W.
//
// A quantized W consists of groups of 32 values along K that share a float16 scale (and offset): value = scale * q +
// offset. x is rounded to int8 with a scale for each of the same groups, so that 64 products are one instruction
// (vpdpbusd: 16 sums of four u8 * s8). One side must be unsigned; this is W, with its zero point moved to 0:
//
//     sum (q - zero) x = sum q x - zero sum x        the sums of x are known before W is read
//
// Shapes: x (M, K), W (N, K), y (M, N).
#pragma once
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "vectors.h"

template <class T>
struct CacheLineAllocator {
  typedef T value_type;
  static constexpr std::align_val_t LINE{64};

  T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), LINE); }
  void deallocate(T* from, size_t) { ::operator delete(from, LINE); }
  bool operator==(const CacheLineAllocator&) const { return true; }
  bool operator!=(const CacheLineAllocator&) const { return false; }
};

// A vector that starts at a cache line: a load of 64 bytes that touches two lines takes twice the time.
template <class T>
using AlignedVector = std::vector<T, CacheLineAllocator<T>>;

enum WeightKind : int32_t { FLOAT32, BFLOAT16, INT8, INT4, INT5, INT6, INT4_HALVES, PARTS };
enum NormKind : int32_t { NO_NORM, ROOT_MEAN_SQUARE, LAYER_NORM, DEVIATION_NORM };

struct Matrix {
  WeightKind kind;
  int32_t num_groups;       // of 32 values along K, an even number; 0 for a plain W
  int64_t N, K;
  const void* values;       // (N, K) float, bfloat16 or int8; (N, K/2) bytes with two 4-bit values each; of PARTS: an
                            // array of matrices whose rows follow each other
  const uint16_t* scales;   // (N, num_groups) float16
  const uint16_t* offsets;  // (N, num_groups) float16, or null: a 4-bit q then means q - 8
  const float* bias;        // (N,) or null
  const uint8_t* high_bits;      // of INT5 and INT6, whose low 4 bits are in `values`: packed/block_formats.py
  const uint8_t* group_scales;   // if not null, scales and offsets are (N, num_groups/8), and those of a group are
  const uint8_t* group_offsets;  // multiplied by these: (N, num_groups), or of half groups (N, 2 num_groups) int8
};

struct Norm {
  NormKind kind;
  float epsilon;
  const float *weight, *bias;  // (K,); bias may be null
};

// Return whether each half of a group has integers of its own that multiply the scale and the offset.
inline bool has_halves(const Matrix& w) { return w.kind == INT6 || w.kind == INT4_HALVES; }

inline int64_t row_bytes(const Matrix& w) {
  return w.kind == FLOAT32 ? w.K * 4 : w.kind == BFLOAT16 ? w.K * 2 : w.num_groups * (w.kind == INT8 ? 32 : 16);
}

// Return the sum of f(x[k]) over all K values: 16 partial sums and then what is left over, always in the same order.
template <class Function>
inline float sum_of(const float* x, int64_t K, Function f) {
  float lanes[16] = {}, sum = 0;
  int64_t k = 0;
  for (; k + 16 <= K; k += 16)
    for (int j = 0; j < 16; j++) lanes[j] += f(x[k + j]);
  for (; k < K; k++) sum += f(x[k]);
  for (int j = 0; j < 16; j++) sum += lanes[j];
  return sum;
}

// y may be x. It is never inlined: all rows then go through the same instructions and get the same bits.
[[gnu::noinline]] inline void normalize(float* y, const float* x, int64_t K, const Norm& norm) {
  if (norm.kind == NO_NORM) {
    if (y != x) std::copy(x, x + K, y);
    return;
  }
  const float mean = norm.kind == ROOT_MEAN_SQUARE ? 0 : sum_of(x, K, [](float v) { return v; }) / K;
  const float squares = sum_of(x, K, [&](float v) { return (v - mean) * (v - mean); });
  const float scale = norm.kind == DEVIATION_NORM ? 1 / (std::sqrt(squares / (K - 1)) + norm.epsilon)
                                                  : 1 / std::sqrt(squares / K + norm.epsilon);
  for (int64_t k = 0; k < K; k++) y[k] = (x[k] - mean) * scale * norm.weight[k] + (norm.bias ? norm.bias[k] : 0);
}

struct QuantizedGroup {
  float scale;
  int sum;  // of the quants
};

// Quantize 32 values to int8. Without their sign, floats compare like their bits, with infinity and NaN above all
// others. If a value is infinite or NaN, which integers cannot represent, the scale is NaN.
inline QuantizedGroup quantize_group(int8_t* quants, const float* values) {
  int32_t bits[32], largest_bits = 0, sum = 0;
  std::memcpy(bits, values, sizeof(bits));
  for (int j = 0; j < 32; j++) largest_bits = std::max(largest_bits, bits[j] & 0x7fffffff);
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof(largest_bits));
  const float inverse = largest > 0 ? 127 / largest : 0;
  for (int j = 0; j < 32; j++) bits[j] = int32_t(__builtin_rintf(values[j] * inverse));
  for (int j = 0; j < 32; j++) quants[j] = int8_t(bits[j]), sum += quants[j];
  return {largest_bits < 0x7f800000 ? largest / 127 : NAN, sum};
}

// Return how far the zero point of W was moved to make its values unsigned: the factor of x's sum.
inline int zero_point(const Matrix& w) {
  return w.kind == INT8 ? 128 : w.offsets ? 0 : w.kind == INT6 ? 32 : w.kind == INT5 ? 16 : 8;
}

// Return the 32-bit words of a row of x in the format of W, padded to a whole vector.
inline int64_t words_per_row(const Matrix& w) {
  return w.kind == FLOAT32    ? (w.K + 15) / 16 * 16
         : w.kind == BFLOAT16 ? (w.K + 31) / 32 * 16
                              : int64_t(w.num_groups) * 8;
}

// Bytes of rows of x that may be transposed instead of W (transposed_rows.h), and how many rows the last panel may lack.
// They have to stay in the second-level cache, which has 1 MB or more on processors with AVX-512.
#ifdef CLEARHEAD_AVX512
constexpr int64_t MAX_TRANSPOSED_BYTES = 768 * 1024, MAX_IDLE_ROWS = 9;
#else
constexpr int64_t MAX_TRANSPOSED_BYTES = 0, MAX_IDLE_ROWS = 0;
#endif

// Rows of x in the format of W.
struct InputRows {
  AlignedVector<uint32_t> words;        // (M, words_per_row)
  AlignedVector<uint32_t> transposed;   // (M / PANEL, words_per_row, PANEL), if x is transposed (transposed_rows.h)
  AlignedVector<int32_t> initial_sums;  // (M, K/32), of half groups (M, 2 K/32): -zero point * sum of quants
  AlignedVector<int32_t> half_sums;     // (M, 2 K/32): the sums of the quants of half groups, if W has halves
  AlignedVector<float> scales, sums;    // (M, K/32)

  // Allocate M rows of up to `longest` words.
  void reserve(int64_t M, int64_t longest) {
    words.resize(std::max<size_t>(words.size(), M * longest));
    scales.resize(std::max<size_t>(scales.size(), M * (longest / 8 + 1)));
    sums.resize(scales.size());
    initial_sums.resize(2 * scales.size());
    half_sums.resize(2 * scales.size());
  }

  // The same for the transposed rows.
  void reserve_transposed(int64_t M, int64_t longest) {
    const int64_t num_words = std::min((M + MAX_IDLE_ROWS) * longest, MAX_TRANSPOSED_BYTES / 4);
    transposed.resize(std::max<size_t>(transposed.size(), num_words));
  }

  typedef uint16_t HalfWord __attribute__((may_alias));
  static void convert(HalfWord* to, const float* from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = to_bfloat16(from[i]);
  }

  // Normalize row m of x and convert it to the format of W.
  [[gnu::noinline]] void set_row(int64_t m, const float* x, const Matrix& w, const Norm& norm) {
    thread_local AlignedVector<float> values;
    values.assign(words_per_row(w) * (w.kind == FLOAT32 ? 1 : w.kind == BFLOAT16 ? 2 : 4), 0);
    normalize(values.data(), x, w.K, norm);
    uint32_t* to = &words[m * words_per_row(w)];
    if (w.kind == FLOAT32) std::memcpy(to, values.data(), words_per_row(w) * 4);
    if (w.kind == BFLOAT16) convert((HalfWord*)to, values.data(), words_per_row(w) * 2);
    for (int64_t g = 0; g < w.num_groups; g++) {
      const int64_t group = m * w.num_groups + g;
      const auto [scale, sum] = quantize_group((int8_t*)(to + g * 8), &values[g * 32]);
      scales[group] = scale;
      sums[group] = scale * sum;
      if (has_halves(w)) {
        int first = 0;
        for (int j = 0; j < 16; j++) first += ((const int8_t*)(to + g * 8))[j];
        half_sums[2 * group] = first, half_sums[2 * group + 1] = sum - first;
        for (int64_t half = 2 * group; half < 2 * group + 2; half++)
          initial_sums[half] = -zero_point(w) * half_sums[half];
      } else {
        initial_sums[group] = -zero_point(w) * sum;
      }
    }
  }
};
