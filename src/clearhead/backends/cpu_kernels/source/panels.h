// 16 or 32 rows of W with their words exchanged, so that a vector holds one word of 16 rows.
#pragma once
#include "tiles.h"

#ifdef CLEARHEAD_AVX512
// Transpose 16 rows of 16 words; load(r) returns row r. Afterwards vector c holds word c of all rows.
template <class Load>
[[gnu::always_inline]] inline void transpose(__m512i (&columns)[16], Load load) {
  __m512i fours[16];  // in each quarter of a vector, one word of four rows
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    Words rows[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) rows[r] = (Words)load(i + r), keep_in_register(rows[r]);
    const __m512i a = _mm512_unpacklo_epi32((__m512i)rows[0], (__m512i)rows[1]);
    const __m512i b = _mm512_unpackhi_epi32((__m512i)rows[0], (__m512i)rows[1]);
    const __m512i c = _mm512_unpacklo_epi32((__m512i)rows[2], (__m512i)rows[3]);
    const __m512i d = _mm512_unpackhi_epi32((__m512i)rows[2], (__m512i)rows[3]);
    fours[i] = _mm512_unpacklo_epi64(a, c), fours[i + 1] = _mm512_unpackhi_epi64(a, c);
    fours[i + 2] = _mm512_unpacklo_epi64(b, d), fours[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {  // 0x88 takes the even quarters of two vectors, 0xdd the odd ones
    const __m512i a = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd);
    columns[j] = _mm512_shuffle_i32x4(a, c, 0x88), columns[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    columns[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88), columns[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

// Return a mask of the first `count` of 16 words.
inline __mmask16 first_words(int64_t count) { return count < 16 ? (1u << count) - 1 : 0xffff; }

// Load up to 16 words of 16 rows, which are `bytes` apart, and transpose them; missing words become 0.
[[gnu::always_inline]] inline void load_transposed(__m512i (&columns)[16], const char* from, int64_t bytes,
                                                   int64_t num_words) {
  const __mmask16 mask = first_words(num_words);
  transpose(columns, [&](int r) { return _mm512_maskz_loadu_epi32(mask, from + r * bytes); });
}
#endif

// Transpose up to 16 words of up to 16 rows, which are `bytes` apart, and call use(c, word c of all rows) for each
// word. Missing rows become 0.
template <class Use>
[[gnu::always_inline]] inline void for_columns(const char* from, int64_t bytes, int64_t num_rows, int64_t num_words,
                                               Use use) {
#ifdef CLEARHEAD_AVX512
  __m512i columns[16];
  const __mmask16 mask = first_words(num_words);
  transpose(columns, [&](int r) { return _mm512_maskz_loadu_epi32(r < num_rows ? mask : 0, from + r * bytes); });
#pragma GCC unroll 16
  for (int c = 0; c < 16; c++)
    if (c < num_words) use(c, (Words)columns[c]);
#else
  Words columns[16] = {};
  for (int64_t r = 0; r < std::min<int64_t>(num_rows, 16); r++)
    for (int64_t c = 0; c < std::min<int64_t>(num_words, 16); c++) {
      uint32_t word;
      std::memcpy(&word, from + r * bytes + c * 4, 4);
      columns[c][r] = word;
    }
  for (int64_t c = 0; c < std::min<int64_t>(num_words, 16); c++) use(c, columns[c]);
#endif
}

inline Vector from_float16(Words halves) {
#ifdef CLEARHEAD_AVX512
  return (Vector)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
#else
  Vector y;
  for (int i = 0; i < 16; i++) y[i] = from_float16(uint16_t(halves[i]));
  return y;
#endif
}

// Return the bytes of a row's high bits.
inline int64_t high_bytes(const Matrix& w) {
  return (w.num_groups + 3) / 4 * (w.kind == INT6 ? 32 : w.kind == INT5 ? 16 : 0);
}

// PANEL rows of W from row n on. W may be null: none.
struct PanelRows {
  const Matrix* w = nullptr;
  int64_t n = 0;

  const char* values() const { return (const char*)w->values + n * row_bytes(*w); }
};

// 32 rows of W, transposed: word i of all rows, then word i + 1.
struct Panel {
  AlignedVector<uint32_t> words;
  AlignedVector<float> scales, offsets;
  AlignedVector<int32_t> half_scales, half_offsets;  // (2 num_groups, PANEL)

  // Transpose rows [n, n + count) of W.
  void fill(const Matrix& w, int64_t n, int64_t count) {
    const int64_t bytes = row_bytes(w);
    words.resize(words_per_row(w) * PANEL);
    const char* rows = (const char*)w.values + n * bytes;
    if (w.kind == INT8)
      fill_words<8>(rows, bytes, count, [](uint32_t* to, Words column) { *(Words*)to = column ^ 0x80808080u; });
    else if (w.kind >= INT4)
      fill_words<4>(rows, bytes, count, [](uint32_t* to, Words column) {  // the low halves of 16 bytes, then the high
        *(Words*)to = column & 0x0f0f0f0fu;
        *(Words*)(to + 4 * PANEL) = column >> 4 & 0x0f0f0f0fu;
      });
    else
      fill_words<8>(rows, bytes, count, [](uint32_t* to, Words column) { *(Words*)to = column; });
    for (int64_t r = 0; w.kind == BFLOAT16 && w.K % 2 && r < count; r++)
      words[w.K / 2 * PANEL + r] = ((const uint16_t*)(rows + r * bytes))[w.K - 1];
    if (w.kind == INT5) add_fifth_bits(w, n, count);
    if (w.kind == INT6) add_two_bits(w, n, count);
    if (w.num_groups) fill_scales(w, n, count);
  }

  // Add the high bits of a 5-bit W. A word of them has a bit for each value of one half of two groups.
  void add_fifth_bits(const Matrix& w, int64_t n, int64_t count) {
    const int64_t bytes = high_bytes(w), num_words = bytes / 4;
    for (int64_t r = 0; r < count; r += 16)
      for (int64_t i = 0; i < num_words; i += 16)
        for_columns((const char*)w.high_bits + (n + r) * bytes + i * 4, bytes, count - r, num_words - i,
                    [&](int c, Words column) {
                      for (int part = 0; part < 8; part++) {
                        const int64_t g = (i + c) / 4 * 4 + c % 2 * 2 + part / 4, j = c % 4 / 2 * 4 + part % 4;
                        // The product moves bit b of four to bit 8 b.
                        if (g < w.num_groups)
                          *(Words*)&words[(g * 8 + j) * PANEL + r] |=
                              ((column >> (4 * part) & 15u) * 0x00204081u & 0x01010101u) << 4;
                      }
                    });
  }

  // Add the high bits of a 6-bit W. A word of them has two bits for each of four values of two groups, both halves.
  void add_two_bits(const Matrix& w, int64_t n, int64_t count) {
    const int64_t bytes = high_bytes(w), num_words = bytes / 4;
    for (int64_t r = 0; r < count; r += 16)
      for (int64_t i = 0; i < num_words; i += 16)
        for_columns((const char*)w.high_bits + (n + r) * bytes + i * 4, bytes, count - r, num_words - i,
                    [&](int c, Words column) {
                      for (int part = 0; part < 4; part++) {
                        const int64_t g = (i + c) / 8 * 4 + part % 2 * 2 + c % 8 / 4, j = part / 2 * 4 + c % 4;
                        *(Words*)&words[(g * 8 + j) * PANEL + r] |= (column >> (2 * part) & 0x03030303u) << 4;
                      }
                    });
  }

  // Write every word of `count` rows to its place in the panel. Each `per_group` words of W become eight words.
  template <int per_group, class Write>
  void fill_words(const char* rows, int64_t bytes, int64_t count, Write write) {
    for (int64_t i = 0; i < bytes / 4; i += 16)
      for (int64_t r = 0; r < count; r += 16) {
        uint32_t* to = &words[i / per_group * 8 * PANEL + r];
        for_columns(rows + r * bytes + i * 4, bytes, count - r, bytes / 4 - i, [&](int c, Words column) {
          write(to + (c / per_group * 8 + c % per_group) * PANEL, column);
        });
      }
  }

  // Convert the scales and offsets of rows [n, n + count) of W to floats.
  void fill_scales(const Matrix& w, int64_t n, int64_t count) {
    if (w.group_scales) return fill_block_scales(w, n, count);
    convert(scales, w.scales, w.num_groups, n, count);
    if (w.offsets) convert(offsets, w.offsets, w.num_groups, n, count);
  }

  // The same for blocks of eight groups: scale of the block * scale of the group, and likewise the offsets. If W has
  // halves, the scales are those of the blocks, and the integers go to `half_scales` and `half_offsets`.
  void fill_block_scales(const Matrix& w, int64_t n, int64_t count) {
    const int64_t G = w.num_groups;
    scales.resize(G * PANEL);
    if (w.offsets) offsets.resize(G * PANEL);
    for (int64_t r = 0; r < count; r += 16) {
      const int64_t rows = std::min<int64_t>(count - r, 16);
      for (int64_t b = 0; b < G / 8; b++) {
        const Vector scale = block_values(w.scales, G / 8, n + r, rows, b);
        for (int64_t g = 8 * b; g < 8 * b + 8; g++) *(Vector*)&scales[g * PANEL + r] = scale;
        if (!w.offsets) continue;
        const Vector offset = block_values(w.offsets, G / 8, n + r, rows, b);
        for (int64_t g = 8 * b; g < 8 * b + 8; g++) *(Vector*)&offsets[g * PANEL + r] = offset;
      }
      if (has_halves(w)) {
        fill_halves(half_scales, w.group_scales, 2 * G, n, r, rows);
        if (w.offsets) fill_halves(half_offsets, w.group_offsets, 2 * G, n, r, rows);
        continue;
      }
      for_bytes(w.group_scales, G, n + r, rows,
                [&](int64_t g, Words bytes) { *(Vector*)&scales[g * PANEL + r] *= to_floats(bytes & 255u); });
      if (w.offsets)
        for_bytes(w.group_offsets, G, n + r, rows,
                  [&](int64_t g, Words bytes) { *(Vector*)&offsets[g * PANEL + r] *= to_floats(bytes & 255u); });
    }
  }

  // Write the signed bytes of rows [n + r, n + r + rows) of (N, count) to columns r, r + 1, ... of (count, PANEL).
  static void fill_halves(AlignedVector<int32_t>& to, const uint8_t* from, int64_t count, int64_t n, int64_t r,
                          int64_t rows) {
    to.resize(count * PANEL);
    for_bytes(from, count, n + r, rows, [&](int64_t half, Words bytes) {
      *(Words*)&to[half * PANEL + r] = (Words)((Integers)(bytes << 24) >> 24);
    });
  }

  // Return the float16 of block b in up to 16 rows of (N, stride).
  static Vector block_values(const uint16_t* values, int64_t stride, int64_t n, int64_t rows, int64_t b) {
    Words halves = {};
    for (int64_t i = 0; i < rows; i++) halves[i] = values[(n + i) * stride + b];
    return from_float16(halves);
  }

  // Call use(i, byte i of up to 16 rows, in the low bits) for each byte of a row of (N, stride), a multiple of 4.
  template <class Use>
  static void for_bytes(const uint8_t* values, int64_t stride, int64_t n, int64_t rows, Use use) {
    for (int64_t i = 0; i < stride / 4; i += 16)
      for_columns((const char*)values + n * stride + i * 4, stride, rows, stride / 4 - i, [&](int c, Words column) {
        for (int byte = 0; byte < 4; byte++) use((i + c) * 4 + byte, column >> (8 * byte));
      });
  }

  // Return the scales of the panel's rows from this one on.
  PanelScales scales_from(const Matrix& w, int64_t row) const {
    return {scales.data() + row, w.offsets ? offsets.data() + row : nullptr,
            has_halves(w) ? half_scales.data() + row : nullptr,
            has_halves(w) && w.offsets ? half_offsets.data() + row : nullptr};
  }

  static void convert(AlignedVector<float>& to, const uint16_t* scales, int64_t num_groups, int64_t n, int64_t count) {
    to.resize(num_groups * PANEL);
    const char* rows = (const char*)(scales + n * num_groups);
    for (int64_t i = 0; i < count * num_groups * 2; i += 64)  // of the next panel
      __builtin_prefetch(rows + PANEL * num_groups * 2 + i, 0, 2);
    for (int64_t r = 0; r < count; r += 16)
      for (int64_t i = 0; i < num_groups / 2; i += 16)
        for_columns(rows + r * num_groups * 2 + i * 4, num_groups * 2, count - r, num_groups / 2 - i,
                    [&](int c, Words column) {
                      float* place = &to[2 * (i + c) * PANEL + r];
                      *(Vector*)place = from_float16(column & 0xffffu);
                      *(Vector*)(place + PANEL) = from_float16(column >> 16);
                    });
  }
};
