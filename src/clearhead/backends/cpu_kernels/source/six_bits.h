// Products with a W of 5 or 6 bits, and the rows of such a W as numbers. Where the bits of a quant are:
// packed/block_formats.py.
//
// A 6-bit W has an integer scale for each half of a group. The products of the halves are summed by themselves,
// multiplied by these integers and added, all exactly, before the group is added to the sums of the row.
#pragma once
#include "few_rows.h"

struct HalfScales {
  const int32_t* scales;         // (2 K/32, PANEL)
  const int32_t* second_sums;    // (rows, K/32): the value with which the sum of a second half begins
};

// Add the two halves of group g of 16 outputs, whose integer products are given.
[[gnu::always_inline]] inline Words join_halves(Words first, Words second, const int32_t* scales) {
  return first * *(const Words*)scales + second * *(const Words*)(scales + PANEL);
}

// y (rows, PANEL) = x times a panel of 6-bit integers; compare multiply_packed_panel.
template <int rows>
inline void multiply_six_bit_panel(float* y, const uint32_t* x, const BandScales& band, const HalfScales& halves,
                                   const uint32_t* w, const float* scales, int64_t num_groups) {
  Vector sums[rows][2] = {};
  for (int64_t g = 0; g < num_groups; g++)
    for (int side = 0; side < 2; side++) {
      Words dots[rows][2];
      for (int r = 0; r < rows; r++) {
        dots[r][0] = broadcast(uint32_t(band.initial_sums[r * num_groups + g]));
        dots[r][1] = broadcast(uint32_t(halves.second_sums[r * num_groups + g]));
      }
      CLEARHEAD_UNROLL
      for (int j = 0; j < 8; j++) {
        const Words word = *(const Words*)(w + (g * 8 + j) * PANEL + side * 16);
        CLEARHEAD_UNROLL
        for (int r = 0; r < rows; r++)
          dots[r][j / 4] = add_byte_products(dots[r][j / 4], word, x[(r * num_groups + g) * 8 + j]);
      }
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++)
        sums[r][side] = add_group(
            sums[r][side], join_halves(dots[r][0], dots[r][1], halves.scales + 2 * g * PANEL + side * 16), band,
            r * num_groups + g, scales + g * PANEL + side * 16, nullptr);
    }
  store_sums(y, PANEL, sums);
}

#ifdef CLEARHEAD_AVX512
// Sum the integers of each group: quarter g of v[r] holds those of group g in row r, and lane r of groups[g] their sum.
[[gnu::always_inline]] inline void sum_groups(Words (&groups)[4], const __m512i (&v)[16]) {
  __m512i fours[4];
  sum_quarters(fours, v);
  const __m512i a = _mm512_shuffle_i32x4(fours[0], fours[1], 0x88), b = _mm512_shuffle_i32x4(fours[0], fours[1], 0xdd);
  const __m512i c = _mm512_shuffle_i32x4(fours[2], fours[3], 0x88), d = _mm512_shuffle_i32x4(fours[2], fours[3], 0xdd);
  groups[0] = (Words)_mm512_shuffle_i32x4(a, c, 0x88), groups[1] = (Words)_mm512_shuffle_i32x4(b, d, 0x88);
  groups[2] = (Words)_mm512_shuffle_i32x4(a, c, 0xdd), groups[3] = (Words)_mm512_shuffle_i32x4(b, d, 0xdd);
}

// Compute y (16) for one row of x and 16 rows of W as they are stored; compare multiply_stored_groups_by_one. A step takes
// four groups of each row. `half_scales` are null for 5 bits.
template <WeightKind kind>
inline void multiply_high_bits_by_one(float* y, const InputRows& x, const char* w, const uint8_t* high, const Matrix& m,
                                      const PanelScales& panel, const int32_t* half_scales) {
  const __m512i nibble = _mm512_set1_epi8(15), zero = _mm512_setzero_si512(), sixteen = _mm512_set1_epi8(16);
  const __m512i two_bits = _mm512_set1_epi8(3), upper_two_bits = _mm512_set1_epi8(0x30);
  const int64_t bytes = row_bytes(m), high_stride = high_bytes(m), G = m.num_groups;
  const BandScales band{x.initial_sums.data(), x.scales.data(), x.sums.data()};
  const uint32_t* xs = x.words.data();
  Vector sums = {};
  Prefetcher prefetcher{w + 16 * bytes, 16}, high_prefetcher{(const char*)high + 16 * high_stride, kind == INT6 ? 8 : 4};
  for (int64_t g = 0; g < G; g += 4) {
    const bool whole = g + 4 <= G;  // the number of groups is even
    const __mmask16 mask = whole ? 0xffff : 0xff;
    const __m512i left = _mm512_loadu_si512(xs + g * 8), right = whole ? _mm512_loadu_si512(xs + g * 8 + 16) : zero;
    const __m512i x_first = _mm512_shuffle_i32x4(left, right, 0x88), x_second = _mm512_shuffle_i32x4(left, right, 0xdd);
    __m512i first[16], second[16];
    prefetcher.step();
    high_prefetcher.step();
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
      const __m512i both = _mm512_maskz_loadu_epi32(mask, w + r * bytes + g * 16);
      __m512i low_part = _mm512_and_si512(both, nibble), high_part = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
      const uint8_t* bits = high + r * high_stride + g / 4 * (kind == INT6 ? 32 : 16);
      if (kind == INT5) {
        uint64_t masks[2];
        std::memcpy(masks, bits, 16);
        low_part = _mm512_mask_add_epi8(low_part, masks[0], low_part, sixteen);
        high_part = _mm512_mask_add_epi8(high_part, masks[1], high_part, sixteen);
        first[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, low_part, x_first), high_part, x_second);
      } else {
        const __m256i stored = _mm256_loadu_si256((const __m256i*)bits);
        // Two bits of the first 32 values, and those of the others above them: bytes of the upper half are shifted.
        const __m512i pairs = _mm512_inserti64x4(_mm512_castsi256_si512(stored), _mm256_srli_epi16(stored, 2), 1);
        low_part = _mm512_or_si512(low_part, _mm512_slli_epi16(_mm512_and_si512(pairs, two_bits), 4));
        high_part = _mm512_or_si512(high_part, _mm512_and_si512(pairs, upper_two_bits));
        first[r] = _mm512_dpbusd_epi32(zero, low_part, x_first);
        second[r] = _mm512_dpbusd_epi32(zero, high_part, x_second);
      }
    }
    Words groups[4], second_groups[4];
    sum_groups(groups, first);
    if (kind == INT6) sum_groups(second_groups, second);
    for (int k = 0; k < (whole ? 4 : 2); k++) {
      Words dots = groups[k] + broadcast(uint32_t(band.initial_sums[g + k]));
      if (kind == INT6)
        dots = join_halves(dots, second_groups[k] + broadcast(uint32_t(x.second_sums[g + k])),
                           half_scales + 2 * (g + k) * PANEL);
      sums = add_group(sums, dots, band, g + k, panel.scales + (g + k) * PANEL,
                       panel.offsets ? panel.offsets + (g + k) * PANEL : nullptr);
    }
  }
  std::memcpy(y, &sums, sizeof(sums));
}

// Compute y (PANEL) for one row of x and rows [n, n + PANEL) of W.
inline void multiply_high_bits(float* y, const InputRows& x, Panel& panel, const Matrix& w, int64_t n) {
  panel.fill_scales(w, n, PANEL);
  for (int64_t half = 0; half < PANEL; half += 16) {
    const PanelScales scales{panel.scales.data() + half, w.offsets ? panel.offsets.data() + half : nullptr};
    const char* from = (const char*)w.values + (n + half) * row_bytes(w);
    const uint8_t* high = w.high_bits + (n + half) * high_bytes(w);
    if (w.kind == INT5)
      multiply_high_bits_by_one<INT5>(y + half, x, from, high, w, scales, nullptr);
    else
      multiply_high_bits_by_one<INT6>(y + half, x, from, high, w, scales, panel.half_scales.data() + half);
  }
}
#endif

// Dequantize row n of a W with high bits or group scales.
inline void unpack_blocks(float* y, const Matrix& w, int64_t n) {
  const int64_t G = w.num_groups;
  const uint8_t* low = (const uint8_t*)w.values + n * G * 16;
  const uint8_t* high = w.high_bits ? w.high_bits + n * high_bytes(w) : nullptr;
  for (int64_t k = 0; k < w.K; k++) {
    const int64_t g = k / 32, side = k % 32 / 16, place = g % 4 * 16 + k % 16;  // of four groups
    const uint8_t byte = low[g * 16 + k % 16];
    int q = side ? byte >> 4 : byte & 15;
    if (w.kind == INT5) q |= (high[g / 4 * 16 + side * 8 + place / 8] >> place % 8 & 1) << 4;
    if (w.kind == INT6) q |= (high[g / 4 * 32 + place % 32] >> (side * 4 + place / 32 * 2) & 3) << 4;
    const int64_t scale_place = w.group_scales ? n * (G / 8) + g / 8 : n * G + g;
    float scale = from_float16(w.scales[scale_place]), offset = w.offsets ? from_float16(w.offsets[scale_place]) : 0;
    if (w.kind == INT6)
      scale *= int8_t(w.group_scales[(n * G + g) * 2 + side]);
    else if (w.group_scales)
      scale *= w.group_scales[n * G + g], offset *= w.group_offsets[n * G + g];
    y[k] = scale * (w.offsets ? q : q - zero_point(w)) + offset;
  }
}
