// Products with a W of 5 or 6 bits, or whose half groups have integers of their own, and the rows of such a W as
// numbers. Where the bits of a quant are: packed/block_formats.py.
//
// Integers of half groups: value = scale * s * (q - zero point), or scale * s * q + offset * m. The products of the
// halves are summed by themselves, multiplied by s and added, all exactly, before the group is added to the sums of the
// row. With an offset, the sums of x over the halves are multiplied by m and added likewise.
#pragma once
#include "few_rows.h"

// Add the two halves of a group, each of which is multiplied by an integer.
[[gnu::always_inline]] inline Words join_halves(Words first, Words second, const int32_t* factors) {
  return first * *(const Words*)factors + second * *(const Words*)(factors + PANEL);
}

// Add group g of row r, at place r * num_groups + g, whose halves have these integer products, to the sums of the 16
// outputs from `column` on.
template <bool has_offsets>
[[gnu::always_inline]] inline Vector add_halves(Vector sum, Words first, Words second, const BandScales& band,
                                                int64_t place, const PanelScales& panel, int64_t g, int column) {
  const Words dots = join_halves(first, second, panel.half_scales + 2 * g * PANEL + column);
  sum = add_group(sum, dots, band, place, panel.scales + g * PANEL + column, nullptr);
  if (!has_offsets) return sum;
  const Words x_sums = join_halves(broadcast(uint32_t(band.half_sums[2 * place])),
                                   broadcast(uint32_t(band.half_sums[2 * place + 1])),
                                   panel.half_offsets + 2 * g * PANEL + column);
  return add_group(sum, x_sums, band, place, panel.offsets + g * PANEL + column, nullptr);
}

// y (rows, PANEL) = x times a panel of integers with half groups; compare multiply_packed_panel.
template <int rows, bool has_offsets>
inline void multiply_half_panel(float* y, const uint32_t* x, const BandScales& band, const uint32_t* w,
                                const PanelScales& panel, const Matrix& matrix, Prefetcher prefetcher) {
  const int64_t num_groups = matrix.num_groups;
  Vector sums[rows][2] = {};
  for (int64_t g = 0; g < num_groups; g++) {
    for (int side = 0; side < 2; side++) {
      Words dots[rows][2];
      for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
          dots[r][half] = broadcast(uint32_t(band.initial_sums[2 * (r * num_groups + g) + half]));
      CLEARHEAD_UNROLL
      for (int j = 0; j < 8; j++) {
        const Words word = *(const Words*)(w + (g * 8 + j) * PANEL + side * 16);
        CLEARHEAD_UNROLL
        for (int r = 0; r < rows; r++)
          dots[r][j / 4] = add_byte_products(dots[r][j / 4], word, x[(r * num_groups + g) * 8 + j]);
      }
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++)
        sums[r][side] =
            add_halves<has_offsets>(sums[r][side], dots[r][0], dots[r][1], band, r * num_groups + g, panel, g, 16 * side);
    }
    prefetcher.step();
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
// four groups of each row.
template <WeightKind kind>
inline void multiply_blocks_by_one(float* y, const InputRows& x, const char* w, const uint8_t* high, const Matrix& m,
                                   const PanelScales& panel) {
  const __m512i nibble = _mm512_set1_epi8(15), zero = _mm512_setzero_si512(), sixteen = _mm512_set1_epi8(16);
  const __m512i two_bits = _mm512_set1_epi8(3), upper_two_bits = _mm512_set1_epi8(0x30);
  const int64_t bytes = row_bytes(m), high_stride = high_bytes(m), G = m.num_groups;
  const BandScales band = band_scales(x, m);
  const uint32_t* xs = x.words.data();
  Vector sums = {};
  constexpr int64_t high_lines = kind == INT6 ? 8 : kind == INT5 ? 4 : 0;
  Prefetcher prefetcher{w + 16 * bytes, 16}, high_prefetcher{(const char*)high + 16 * high_stride, high_lines};
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
      if (kind == INT5) {
        uint64_t masks[2];
        std::memcpy(masks, high + r * high_stride + g / 4 * 16, 16);
        low_part = _mm512_mask_add_epi8(low_part, masks[0], low_part, sixteen);
        high_part = _mm512_mask_add_epi8(high_part, masks[1], high_part, sixteen);
      } else if (kind == INT6) {
        const __m256i stored = _mm256_loadu_si256((const __m256i*)(high + r * high_stride + g / 4 * 32));
        // Two bits of the first 32 values, and those of the others above them: bytes of the upper half are shifted.
        const __m512i pairs = _mm512_inserti64x4(_mm512_castsi256_si512(stored), _mm256_srli_epi16(stored, 2), 1);
        low_part = _mm512_or_si512(low_part, _mm512_slli_epi16(_mm512_and_si512(pairs, two_bits), 4));
        high_part = _mm512_or_si512(high_part, _mm512_and_si512(pairs, upper_two_bits));
      }
      first[r] = _mm512_dpbusd_epi32(zero, low_part, x_first);
      if (kind == INT5)
        first[r] = _mm512_dpbusd_epi32(first[r], high_part, x_second);
      else
        second[r] = _mm512_dpbusd_epi32(zero, high_part, x_second);
    }
    Words groups[4], second_groups[4];
    sum_groups(groups, first);
    if (kind != INT5) sum_groups(second_groups, second);
    for (int64_t k = g; k < std::min(g + 4, G); k++)
      if (kind == INT5)
        sums = add_group(sums, groups[k - g] + broadcast(uint32_t(band.initial_sums[k])), band, k,
                         panel.scales + k * PANEL, panel.offsets ? panel.offsets + k * PANEL : nullptr);
      else
        sums = (panel.offsets ? add_halves<true> : add_halves<false>)(
            sums, groups[k - g] + broadcast(uint32_t(band.initial_sums[2 * k])),
            second_groups[k - g] + broadcast(uint32_t(band.initial_sums[2 * k + 1])), band, k, panel, k, 0);
  }
  std::memcpy(y, &sums, sizeof(sums));
}

// Compute y (PANEL) for one row of x and rows [n, n + PANEL) of W.
inline void multiply_blocks(float* y, const InputRows& x, Panel& panel, const Matrix& w, int64_t n) {
  panel.fill_scales(w, n, PANEL);
  for (int64_t row = 0; row < PANEL; row += 16) {
    const char* from = (const char*)w.values + (n + row) * row_bytes(w);
    const uint8_t* high = w.high_bits + (n + row) * high_bytes(w);
    (w.kind == INT5   ? multiply_blocks_by_one<INT5>
     : w.kind == INT6 ? multiply_blocks_by_one<INT6>
                      : multiply_blocks_by_one<INT4_HALVES>)(y + row, x, from, high, w, panel.scales_from(w, row));
  }
}

// Return whether W is read as it is stored for one row of x only.
inline bool is_read_by_one(const Matrix& w) { return w.kind == INT5 || has_halves(w); }
#endif

// Dequantize row n of a W with high bits or integers of groups.
inline void unpack_blocks(float* y, const Matrix& w, int64_t n) {
  const int64_t G = w.num_groups;
  const uint8_t* row = (const uint8_t*)w.values + n * row_bytes(w);
  const uint8_t* high = w.high_bits ? w.high_bits + n * high_bytes(w) : nullptr;
  for (int64_t k = 0; k < w.K; k++) {
    const int64_t g = k / 32, side = k % 32 / 16, place = g % 4 * 16 + k % 16;  // of four groups
    const uint8_t byte = row[w.kind == INT8 ? k : g * 16 + k % 16];
    int q = w.kind == INT8 ? byte ^ 128 : side ? byte >> 4 : byte & 15;
    if (w.kind == INT5) q |= (high[g / 4 * 16 + side * 8 + place / 8] >> place % 8 & 1) << 4;
    if (w.kind == INT6) q |= (high[g / 4 * 32 + place % 32] >> (side * 4 + place / 32 * 2) & 3) << 4;
    const int64_t scale_place = w.group_scales ? n * (G / 8) + g / 8 : n * G + g;
    float scale = from_float16(w.scales[scale_place]), offset = w.offsets ? from_float16(w.offsets[scale_place]) : 0;
    const int64_t group = n * G + g, half = 2 * group + side;
    if (w.group_scales) scale *= has_halves(w) ? int8_t(w.group_scales[half]) : w.group_scales[group];
    if (w.group_offsets) offset *= has_halves(w) ? int8_t(w.group_offsets[half]) : w.group_offsets[group];
    y[k] = scale * (w.offsets ? q : q - zero_point(w)) + offset;
  }
}
