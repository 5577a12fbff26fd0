// Products and attention for many rows at once, as in a prompt or a large batch. The time is that of the
// multiplications, not that of reading W. W is transposed 32 rows at a time into a panel, which stays in the
// processor's cache while all rows of x are multiplied with it; keys form panels too. References and shapes as in
// linear.h and attention.h; T tokens of each of B sequences.
#pragma once
#include "attention.h"

// --- products

#ifdef CLEARHEAD_AVX512
// One step of a transposition: in every two rows that are `step` apart, exchange the lanes that are `step` apart.
template <int step>
inline void exchange_lanes(__m512i (&rows)[16]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i other = _mm512_set1_epi32(16);
  const __m512i away = _mm512_set1_epi32(step);
  const __mmask16 high = _mm512_test_epi32_mask(lane, away);
  const __m512i upper = _mm512_mask_add_epi32(lane, high, _mm512_sub_epi32(lane, away), other);
  const __m512i lower = _mm512_mask_add_epi32(_mm512_add_epi32(lane, away), high, lane, other);
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) {
    if (r & step) continue;
    const __m512i a = rows[r], b = rows[r + step];
    rows[r] = _mm512_permutex2var_epi32(a, upper, b);
    rows[r + step] = _mm512_permutex2var_epi32(a, lower, b);
  }
}
#endif

// Transpose up to 16 words of up to 16 rows, which are `bytes` apart; missing words and rows become 0.
inline void transpose(Words (&columns)[16], const char* from, int64_t bytes, int64_t num_rows, int64_t num_words) {
#ifdef CLEARHEAD_AVX512
  const __mmask16 mask = num_words < 16 ? (1u << num_words) - 1 : 0xffff;
  __m512i rows[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) {
    rows[r] = _mm512_maskz_loadu_epi32(r < num_rows ? mask : 0, from + r * bytes);
    __builtin_prefetch(from + (PANEL + r) * bytes, 0, 2);  // of the next panel: without it, half of the time is waiting
  }
  exchange_lanes<8>(rows);
  exchange_lanes<4>(rows);
  exchange_lanes<2>(rows);
  exchange_lanes<1>(rows);
#pragma GCC unroll 16
  for (int c = 0; c < 16; c++) columns[c] = (Words)rows[c];
#else
  uint32_t words[16] = {};
  for (int64_t r = 0; r < 16; r++) {
    if (r < num_rows) std::memcpy(words, from + r * bytes, std::min<int64_t>(num_words, 16) * 4);
    for (int c = 0; c < 16; c++) columns[c][r] = r < num_rows ? words[c] : 0;
  }
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

// 32 rows of W, transposed: word i of all rows, then word i + 1.
struct Panel {
  std::vector<uint32_t> words;
  std::vector<float> scales, offsets;

  // Transpose rows [n, n + count) of W.
  void fill(const Matrix& w, int64_t n, int64_t count) {
    const int64_t bytes = row_bytes(w);
    words.resize(words_per_row(w) * PANEL);
    const char* rows = (const char*)w.values + n * bytes;
    for_columns(rows, bytes, count, [&](int64_t i, int64_t r, Words column) {
      if (w.kind == INT4) {  // the low halves of 16 bytes, then the high halves
        store(i / 4 * 8 + i % 4, r, column & 0x0f0f0f0fu);
        store(i / 4 * 8 + i % 4 + 4, r, column >> 4 & 0x0f0f0f0fu);
      } else {
        store(i, r, w.kind == INT8 ? column ^ 0x80808080u : column);
      }
    });
    for (int64_t r = 0; w.kind == BFLOAT16 && w.K % 2 && r < count; r++)
      words[w.K / 2 * PANEL + r] = ((const uint16_t*)(rows + r * bytes))[w.K - 1];
    fill_scales(scales, w.scales, w.num_groups, n, count);
    if (w.offsets) fill_scales(offsets, w.offsets, w.num_groups, n, count);
  }

  static void fill_scales(std::vector<float>& to, const uint16_t* scales, int64_t num_groups, int64_t n,
                          int64_t count) {
    to.resize(num_groups * PANEL);
    for_columns((const char*)(scales + n * num_groups), num_groups * 2, count, [&](int64_t i, int64_t r, Words column) {
      *(Vector*)&to[2 * i * PANEL + r] = from_float16(column & 0xffffu);
      *(Vector*)&to[(2 * i + 1) * PANEL + r] = from_float16(column >> 16);
    });
  }

  // Call use(word number, first row, words of 16 rows) for every word of `count` rows.
  template <class Use>
  static void for_columns(const char* rows, int64_t bytes, int64_t count, Use use) {
    for (int64_t r = 0; r < count; r += 16)
      for (int64_t i = 0; i < bytes / 4; i += 16) {
        Words columns[16];
        transpose(columns, rows + r * bytes + i * 4, bytes, count - r, bytes / 4 - i);
        for (int64_t j = 0; j < std::min<int64_t>(16, bytes / 4 - i); j++) use(i + j, r, columns[j]);
      }
  }

  void store(int64_t i, int64_t r, Words column) { *(Words*)&words[i * PANEL + r] = column; }
};

// Compute y (count, PANEL) = W x + bias for rows [n, n + columns) of W and rows [m, m + count) of x.
template <int rows = BAND>
void multiply_panel(float* y, const InputRows& x, int64_t m, int64_t count, const Panel& panel, const Matrix& w,
                    int64_t n, int64_t columns) {
  if constexpr (rows > 1)
    if (count < rows) return multiply_panel<rows - 1>(y, x, m, count, panel, w, n, columns);
  const int64_t stride = words_per_row(w), place = m * w.num_groups;
  const uint32_t *xs = &x.words[m * stride], *words = panel.words.data();
  if (w.kind == FLOAT32)
    multiply_float_panel<rows>(y, PANEL, (const float*)xs, stride, (const float*)words, PANEL, w.K);
  else if (w.kind == BFLOAT16)
    multiply_bfloat16_panel<rows>(y, xs, stride, words, (w.K + 1) / 2);
  else
    multiply_packed_panel<rows>(y, xs, {&x.initial_sums[place], &x.scales[place], &x.sums[place]}, words,
                                {panel.scales.data(), w.offsets ? panel.offsets.data() : nullptr}, w.num_groups);
  for (int64_t r = 0; w.bias && r < rows; r++)
    for (int64_t c = 0; c < columns; c++) y[r * PANEL + c] += w.bias[n + c];
}

// Compute y = activation(W norm(x) + bias) + residual in panels; arguments as in linear.h.
inline void linear_panels(const Thread& thread, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                          Activation activation, bool gated, const float* residual, InputRows& rows) {
  for (int64_t m = thread.first(M); m < thread.last(M); m++) rows.set_row(m, x + m * w.K, w, norm);
#pragma omp barrier
  thread_local Panel panel, up_panel;
  const int64_t N = w.N / (gated ? 2 : 1), panels = (N + PANEL - 1) / PANEL;
  const int64_t end = std::min(N, thread.last(panels) * PANEL), bands = (M + BAND - 1) / BAND;
  for (int64_t n = thread.first(panels) * PANEL; n < end; n += PANEL) {
    const int64_t columns = std::min(PANEL, end - n);
    panel.fill(w, n, columns);
    if (gated) up_panel.fill(w, N + n, columns);
    for (int64_t band = 0; band < bands; band++) {
      const int64_t m = M * band / bands, count = M * (band + 1) / bands - m;
      float part[BAND * PANEL], up[BAND * PANEL];
      multiply_panel(part, rows, m, count, panel, w, n, columns);
      if (gated) multiply_panel(up, rows, m, count, up_panel, w, N + n, columns);
      activate(part, count * PANEL, activation);
      for (int64_t r = 0; r < count; r++)
        for (int64_t c = 0; c < columns; c++) {
          const int64_t place = (m + r) * N + n + c, element = r * PANEL + c;
          y[place] = part[element] * (gated ? up[element] : 1) + (residual ? residual[place] : 0);
        }
    }
  }
}

// --- attention

// Round up to whole panels.
inline int64_t round_up(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// Keys and values of all sequences and heads as floats, shared by all threads: keys (B, K, S/PANEL, H, PANEL), so that
// a vector holds the same entry of 16 keys; values (B, K, S, H). S, and H of the values, are padded to whole panels.
struct FloatKeysValues {
  std::vector<float> keys, values;

  void reserve(int64_t B, const Heads& heads, const KeyValueView& cache) {
    const size_t slots = B * heads.K * round_up(cache.S);
    keys.resize(std::max(keys.size(), slots * heads.H));
    values.resize(std::max(values.size(), slots * round_up(heads.H)));
  }
};

// Turn scores (rows, S) into unnormalized softmax weights, and compute their sums. Row r attends to slots below
// ends[r].
inline void exponentiate_scores(float* scores, float* sums, const int64_t* ends, int64_t rows, int64_t S,
                                const uint8_t* allowed, int64_t num_slots) {
  for (int64_t r = 0; r < rows; r++) {
    float* row = scores + r * S;
    const uint8_t* mask = allowed ? allowed + r * num_slots : nullptr;
    for (int64_t s = 0; mask && s < ends[r]; s++) row[s] = mask[s] ? row[s] : MASKED;
    const float largest = ends[r] ? max_of(row, ends[r]) : MASKED;
    float sum = 0;
    for (int64_t s = 0; s < ends[r]; s++) {
      row[s] = row[s] == MASKED ? 0 : exponential(row[s] - largest);
      sum += row[s];
    }
    std::fill(row + ends[r], row + S, 0.f);
    sums[r] = sum;
  }
}

// Attention of the last T tokens of the cache. Each attends to all tokens up to itself, or to all with
// `attends_to_all`.
struct PromptAttention {
  const int64_t B, T;
  const bool attends_to_all;
  const Heads& heads;
  const KeyValueView& cache;
  FloatKeysValues& floats;

  // Rotate the queries in place and store the new keys and values; projected (B, T, (N + 2K) H).
  template <class Element>
  void rotate_and_store(const Thread& thread, float* projected, const RotationAngles& angles) const {
    const int64_t H = heads.H, width = (heads.N + 2 * heads.K) * H;
    for (int64_t m = thread.first(B * T); m < thread.last(B * T); m++) {
      float* row = projected + m * width;
      for (int64_t n = 0; n < heads.N; n++)
        norm_and_rotate(row + n * H, row + n * H, heads, heads.query_norm, angles, m / T, m % T);
      for (int64_t k = 0; k < heads.K; k++) store_key_value<Element>(row, m / T, m % T, k, heads, cache, angles);
    }
  }

  // Compute y (B, T, N H). q (B, T, q_stride) begins with the queries of each token.
  template <class Element>
  void attend(const Thread& thread, float* y, const float* q, int64_t q_stride) const {
    const int64_t slots = B * heads.K * round_up(cache.S), bands = (T + BAND - 1) / BAND;
    for (int64_t slot = thread.first(slots); slot < thread.last(slots); slot++) convert_slot<Element>(slot);
#pragma omp barrier
    // Later tokens attend to more slots, so bands are dealt out in turn: every thread gets the same share of work.
    for (int64_t task = thread.number; task < B * heads.N * bands; task += thread.count)
      attend_band(y, q, q_stride, task / bands / heads.N, task / bands % heads.N, task % bands * BAND);
  }

  // Convert one slot of the cache to floats.
  template <class Element>
  void convert_slot(int64_t slot) const {
    const int64_t H = heads.H, s = slot % round_up(cache.S), head = slot / round_up(cache.S);
    if (s >= cache.S) return;
    const int64_t b = head / heads.K, k = head % heads.K;
    const int64_t place = b * cache.row_stride + k * cache.head_stride + s * cache.slot_stride;
    float *key = &floats.keys[slot / PANEL * PANEL * H + slot % PANEL], *value = &floats.values[slot * round_up(H)];
    for (int64_t h = 0; h < H; h++) key[h * PANEL] = read(((const Element*)cache.keys)[place + h]);
    for (int64_t h = 0; h < H; h++) value[h] = read(((const Element*)cache.values)[place + h]);
  }

  // Compute query head n for tokens [t, t + BAND) of sequence b.
  void attend_band(float* y, const float* q, int64_t q_stride, int64_t b, int64_t n, int64_t t) const {
    const int64_t H = heads.H, rows = std::min(BAND, T - t), head = b * heads.K + n / (heads.N / heads.K);
    const uint8_t* allowed = cache.allowed ? cache.allowed + (b * T + t) * cache.S : nullptr;
    thread_local std::vector<float> queries, scores, out;
    queries.assign(BAND * H, 0);
    scores.resize(BAND * round_up(cache.S));
    out.resize(BAND * round_up(H));
    int64_t ends[BAND], last_end = 0;
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t h = 0; h < H; h++) queries[r * H + h] = q[(b * T + t + r) * q_stride + n * H + h] * heads.scale;
      ends[r] = attends_to_all || allowed ? cache.S : cache.S - T + t + r + 1;
      while (allowed && ends[r] && !allowed[r * cache.S + ends[r] - 1]) ends[r]--;
      last_end = std::max(last_end, ends[r]);
    }
    const int64_t S = round_up(last_end), first = head * round_up(cache.S);
    const float *keys = &floats.keys[first * H], *values = &floats.values[first * round_up(H)];
    for (int64_t s = 0; s < S; s += PANEL)
      multiply_float_panel<BAND>(&scores[s], S, queries.data(), H, keys + s * H, PANEL, H);
    float sums[BAND];
    exponentiate_scores(scores.data(), sums, ends, rows, S, allowed, cache.S);
    for (int64_t h = 0; h < H; h += PANEL)
      multiply_float_panel<BAND>(&out[h], round_up(H), scores.data(), S, values + h, round_up(H), last_end);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t h = 0; h < H; h++)
        y[((b * T + t + r) * heads.N + n) * H + h] = sums[r] == 0 ? 0 : out[r * round_up(H) + h] / sums[r];
  }
};
