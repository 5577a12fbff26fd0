// Many rows at once, as a prompt or a batch brings them: what counts is no longer to read W but to multiply in every cycle. W is
// laid out 32 rows at a time, and stays in the nearest cache while all of x goes by; keys and values likewise.
// Twins and shapes as in linear.h and attend.h; T tokens of each of B rows.
#pragma once
#include "attention.h"

// --- products

#ifdef CLEARHEAD_VECTORS
// Of every two rows, `step` apart, the lanes that are as far apart change places.
template <int step>
inline void exchange(__m512i (&rows)[16]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), other = _mm512_set1_epi32(16);
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

// The first words of some rows, `bytes` apart, as columns: 16 of each, or 0 where there are fewer.
inline void turn(Words (&columns)[16], const char* from, int64_t bytes, int64_t num_rows, int64_t num_words) {
#ifdef CLEARHEAD_VECTORS
  const __mmask16 mask = num_words < 16 ? (1u << num_words) - 1 : 0xffff;
  __m512i rows[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) {
    rows[r] = _mm512_maskz_loadu_epi32(r < num_rows ? mask : 0, from + r * bytes);
    __builtin_prefetch(from + (PANEL + r) * bytes, 0, 2);  // of the next panel: without it half of the time is waiting
  }
  exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
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
#ifdef CLEARHEAD_VECTORS
  return (Vector)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)halves));
#else
  Vector y;
  for (int i = 0; i < 16; i++) y[i] = from_float16(uint16_t(halves[i]));
  return y;
#endif
}

struct Panel {
  std::vector<uint32_t> words;
  std::vector<float> scales, offsets;

  // Rows [n, n + count) of W.
  void fill(const Matrix& w, int64_t n, int64_t count) {
    const int64_t bytes = row_bytes(w);
    words.resize(words_of(w) * PANEL);
    const char* rows = (const char*)w.values + n * bytes;
    for_columns(rows, bytes, count, [&](int64_t i, int64_t r, Words column) {
      if (w.kind == FOUR) {  // the low halves of 16 bytes, then the high ones
        store(i / 4 * 8 + i % 4, r, column & 0x0f0f0f0fu);
        store(i / 4 * 8 + i % 4 + 4, r, column >> 4 & 0x0f0f0f0fu);
      } else {
        store(i, r, w.kind == EIGHT ? column ^ 0x80808080u : column);
      }
    });
    for (int64_t r = 0; w.kind == HALF && w.K % 2 && r < count; r++)
      words[w.K / 2 * PANEL + r] = ((const uint16_t*)(rows + r * bytes))[w.K - 1];
    fill_scales(scales, w.scales, w.num_groups, n, count);
    if (w.offsets) fill_scales(offsets, w.offsets, w.num_groups, n, count);
  }

  static void fill_scales(std::vector<float>& to, const uint16_t* scales, int64_t num_groups, int64_t n, int64_t count) {
    to.resize(num_groups * PANEL);
    for_columns((const char*)(scales + n * num_groups), num_groups * 2, count, [&](int64_t i, int64_t r, Words column) {
      *(Vector*)&to[2 * i * PANEL + r] = from_float16(column & 0xffffu);
      *(Vector*)&to[(2 * i + 1) * PANEL + r] = from_float16(column >> 16);
    });
  }

  // Every word of `count` rows, 16 rows at a time.
  template <class Use>
  static void for_columns(const char* rows, int64_t bytes, int64_t count, Use use) {
    for (int64_t r = 0; r < count; r += 16)
      for (int64_t i = 0; i < bytes / 4; i += 16) {
        Words columns[16];
        turn(columns, rows + r * bytes + i * 4, bytes, count - r, bytes / 4 - i);
        for (int64_t j = 0; j < std::min<int64_t>(16, bytes / 4 - i); j++) use(i + j, r, columns[j]);
      }
  }

  void store(int64_t i, int64_t r, Words column) { *(Words*)&words[i * PANEL + r] = column; }
};

// y (count, PANEL) = W x + bias: rows [n, n + columns) of W against rows [m, m + count) of x.
template <int rows = BAND>
void meet(float* y, const Rows& x, int64_t m, int64_t count, const Panel& panel, const Matrix& w, int64_t n, int64_t columns) {
  if constexpr (rows > 1)
    if (count < rows) return meet<rows - 1>(y, x, m, count, panel, w, n, columns);
  const int64_t stride = words_of(w), place = m * w.num_groups;
  const uint32_t *xs = &x.words[m * stride], *words = panel.words.data();
  if (w.kind == FULL)
    meet_floats<rows>(y, PANEL, (const float*)xs, stride, (const float*)words, PANEL, w.K);
  else if (w.kind == HALF)
    meet_halves<rows>(y, xs, stride, words, (w.K + 1) / 2);
  else
    meet_groups<rows>(y, xs, {&x.start[place], &x.scales[place], &x.sums[place]}, words,
                      {panel.scales.data(), w.offsets ? panel.offsets.data() : nullptr}, w.num_groups);
  for (int64_t r = 0; w.bias && r < rows; r++)
    for (int64_t c = 0; c < columns; c++) y[r * PANEL + c] += w.bias[n + c];
}

inline void linear_many(const Member& me, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                        Activation activation, bool gated, const float* residual, Rows& rows) {
  for (int64_t m = me.first(M); m < me.last(M); m++) rows.put(m, x + m * w.K, w, norm);
#pragma omp barrier
  thread_local Panel panel, up_panel;
  const int64_t N = w.N / (gated ? 2 : 1), panels = (N + PANEL - 1) / PANEL, end = std::min(N, me.last(panels) * PANEL);
  const int64_t bands = (M + BAND - 1) / BAND;
  for (int64_t n = me.first(panels) * PANEL; n < end; n += PANEL) {
    const int64_t columns = std::min(PANEL, end - n);
    panel.fill(w, n, columns);
    if (gated) up_panel.fill(w, N + n, columns);
    for (int64_t band = 0; band < bands; band++) {
      const int64_t m = M * band / bands, count = M * (band + 1) / bands - m;
      float part[BAND * PANEL], up[BAND * PANEL];
      meet(part, rows, m, count, panel, w, n, columns);
      if (gated) meet(up, rows, m, count, up_panel, w, N + n, columns);
      activate(part, count * PANEL, activation);
      for (int64_t r = 0; r < count; r++)
        for (int64_t c = 0; c < columns; c++) {
          const int64_t place = (m + r) * N + n + c, here = r * PANEL + c;
          y[place] = part[here] * (gated ? up[here] : 1) + (residual ? residual[place] : 0);
        }
    }
  }
}

// --- attention

inline int64_t whole(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// Keys and values of every row and head as floats, for all threads: keys (B, K, S/PANEL, H, PANEL), so that a vector
// holds the same number of 16 of them; values (B, K, S, H). S, and H of the values, are filled up to whole panels.
struct Seen {
  std::vector<float> keys, values;

  void reserve(int64_t B, const Heads& heads, const Kept& kept) {
    const size_t slots = B * heads.K * whole(kept.S);
    keys.resize(std::max(keys.size(), slots * heads.H));
    values.resize(std::max(values.size(), slots * whole(heads.H)));
  }
};

// Scores (rows, S) become weights, and their sum; `ends` says how far each row sees.
inline void weigh(float* scores, float* sums, const int64_t* ends, int64_t rows, int64_t S, const uint8_t* allowed,
                  int64_t num_slots) {
  for (int64_t r = 0; r < rows; r++) {
    float* row = scores + r * S;
    const uint8_t* seen = allowed ? allowed + r * num_slots : nullptr;
    for (int64_t s = 0; seen && s < ends[r]; s++) row[s] = seen[s] ? row[s] : NOTHING;
    const float largest = ends[r] ? largest_of(row, ends[r]) : NOTHING;
    float sum = 0;
    for (int64_t s = 0; s < ends[r]; s++) {
      row[s] = row[s] == NOTHING ? 0 : exponential(row[s] - largest);
      sum += row[s];
    }
    std::fill(row + ends[r], row + S, 0.f);
    sums[r] = sum;
  }
}

// T tokens of each row, the last of those kept, look at the keys and values up to their own, or at all with `across`.
struct Looks {
  const int64_t B, T;
  const bool across;
  const Heads& heads;
  const Kept& kept;
  Seen& seen;

  // Rotate the queries in place and keep what is new; projected (B, T, (N + 2K) H).
  template <class Element>
  void place(const Member& me, float* projected, const Angles& angles) const {
    const int64_t H = heads.H, width = (heads.N + 2 * heads.K) * H;
    for (int64_t m = me.first(B * T); m < me.last(B * T); m++) {
      float* row = projected + m * width;
      for (int64_t n = 0; n < heads.N; n++)
        place_head(row + n * H, row + n * H, heads, heads.query_norm, angles, m / T, m % T);
      for (int64_t k = 0; k < heads.K; k++) keep<Element>(row, m / T, m % T, k, heads, kept, angles);
    }
  }

  // y (B, T, N H); q (B, T, ...) with the queries of a token at its beginning.
  template <class Element>
  void look(const Member& me, float* y, const float* q, int64_t q_stride) const {
    const int64_t slots = B * heads.K * whole(kept.S), bands = (T + BAND - 1) / BAND;
    for (int64_t slot = me.first(slots); slot < me.last(slots); slot++) see<Element>(slot);
#pragma omp barrier
    // Later tokens see more: in turns, not in halves, each thread has its share of them.
    for (int64_t task = me.number; task < B * heads.N * bands; task += me.count)
      look_band(y, q, q_stride, task / bands / heads.N, task / bands % heads.N, task % bands * BAND);
  }

  template <class Element>
  void see(int64_t slot) const {
    const int64_t H = heads.H, s = slot % whole(kept.S), head = slot / whole(kept.S);
    if (s >= kept.S) return;
    const int64_t place = head / heads.K * kept.row_stride + head % heads.K * kept.head_stride + s * kept.slot_stride;
    float *key = &seen.keys[slot / PANEL * PANEL * H + slot % PANEL], *value = &seen.values[slot * whole(H)];
    for (int64_t h = 0; h < H; h++) key[h * PANEL] = read(((const Element*)kept.keys)[place + h]);
    for (int64_t h = 0; h < H; h++) value[h] = read(((const Element*)kept.values)[place + h]);
  }

  // Tokens [t, t + BAND) of row b through query head n.
  void look_band(float* y, const float* q, int64_t q_stride, int64_t b, int64_t n, int64_t t) const {
    const int64_t H = heads.H, rows = std::min(BAND, T - t), head = b * heads.K + n / (heads.N / heads.K);
    const uint8_t* allowed = kept.allowed ? kept.allowed + (b * T + t) * kept.S : nullptr;
    thread_local std::vector<float> queries, scores, out;
    queries.assign(BAND * H, 0);
    scores.resize(BAND * whole(kept.S));
    out.resize(BAND * whole(H));
    int64_t ends[BAND], furthest = 0;
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t h = 0; h < H; h++) queries[r * H + h] = q[(b * T + t + r) * q_stride + n * H + h] * heads.scale;
      ends[r] = across || allowed ? kept.S : kept.S - T + t + r + 1;
      while (allowed && ends[r] && !allowed[r * kept.S + ends[r] - 1]) ends[r]--;
      furthest = std::max(furthest, ends[r]);
    }
    const int64_t S = whole(furthest), first = head * whole(kept.S);
    const float *keys = &seen.keys[first * H], *values = &seen.values[first * whole(H)];
    for (int64_t s = 0; s < S; s += PANEL) meet_floats<BAND>(&scores[s], S, queries.data(), H, keys + s * H, PANEL, H);
    float sums[BAND];
    weigh(scores.data(), sums, ends, rows, S, allowed, kept.S);
    for (int64_t h = 0; h < H; h += PANEL)
      meet_floats<BAND>(&out[h], whole(H), scores.data(), S, values + h, whole(H), furthest);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t h = 0; h < H; h++)
        y[((b * T + t + r) * heads.N + n) * H + h] = sums[r] == 0 ? 0 : out[r * whole(H) + h] / sums[r];
  }
};
