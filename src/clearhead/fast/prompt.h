// Many rows at once, as a prompt brings them: what counts is no longer to read W but to multiply in every cycle. W is
// laid out 32 rows at a time, and stays in the nearest cache while all of x goes by; keys and values likewise.
// Twins and shapes as in linear.h and attend.h; T tokens of each of B rows.
#pragma once
#include "attend.h"

// --- products

struct Panel {
  std::vector<uint32_t> words;
  std::vector<float> scales, offsets;

  // Rows [n, n + count) of W.
  void fill(const Matrix& w, int64_t n, int64_t count) {
    words.resize(words_of(w) * PANEL);
    scales.assign(w.num_groups * PANEL, 0);
    offsets.assign(w.num_groups * PANEL, 0);
    for (int64_t r = 0; r < count; r++) {
      fill_words(&words[r], (const char*)w.values + (n + r) * row_bytes(w), w);
      for (int64_t g = 0; g < w.num_groups; g++) {
        scales[g * PANEL + r] = from_float16(w.scales[(n + r) * w.num_groups + g]);
        if (w.offsets) offsets[g * PANEL + r] = from_float16(w.offsets[(n + r) * w.num_groups + g]);
      }
    }
  }

  static void fill_words(uint32_t* to, const char* from, const Matrix& w) {
    auto word = [&](int64_t i) {
      uint32_t four;
      std::memcpy(&four, from + i * 4, 4);
      return four;
    };
    const int64_t count = row_bytes(w) / 4;
    if (w.kind == FOUR)  // the low halves of 16 bytes, then the high ones
      for (int64_t i = 0; i < count; i++) {
        uint32_t* place = to + (i / 4 * 8 + i % 4) * PANEL;
        place[0] = word(i) & 0x0f0f0f0f;
        place[4 * PANEL] = word(i) >> 4 & 0x0f0f0f0f;
      }
    else
      for (int64_t i = 0; i < count; i++) to[i * PANEL] = word(i) ^ (w.kind == EIGHT ? 0x80808080 : 0);
    if (w.kind == HALF && w.K % 2) to[count * PANEL] = ((const uint16_t*)from)[w.K - 1];
  }
};

// y (BAND, PANEL) = W x + bias: rows [n, n + count) of W against rows [m, m + BAND) of x.
inline void meet(float* y, const Rows& rows, int64_t m, const Panel& panel, const Matrix& w, int64_t n, int64_t count) {
  const uint32_t *x = &rows.words[m * words_of(w)], *words = panel.words.data();
  if (w.kind == FULL) meet_floats<BAND>(y, PANEL, (const float*)x, words_of(w), (const float*)words, PANEL, w.K);
  if (w.kind == HALF) meet_halves(y, x, words_of(w), words, (w.K + 1) / 2);
  if (w.num_groups) {
    const int64_t place = m * w.num_groups;
    meet_groups(y, x, {&rows.start[place], &rows.scales[place], &rows.sums[place]}, words,
                {panel.scales.data(), w.offsets ? panel.offsets.data() : nullptr}, w.num_groups);
  }
  if (w.bias)
    for (int64_t r = 0; r < BAND; r++)
      for (int64_t c = 0; c < count; c++) y[r * PANEL + c] += w.bias[n + c];
}

inline void linear_many(const Member& me, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                        Activation activation, bool gated, const float* residual, Rows& rows) {
  for (int64_t m = me.first(M); m < me.last(M); m++) rows.put(m, x + m * w.K, w, norm);
#pragma omp barrier
  thread_local Panel panel, up_panel;
  const int64_t N = w.N / (gated ? 2 : 1), panels = (N + PANEL - 1) / PANEL, end = std::min(N, me.last(panels) * PANEL);
  for (int64_t n = me.first(panels) * PANEL; n < end; n += PANEL) {
    const int64_t count = std::min(PANEL, end - n);
    panel.fill(w, n, count);
    if (gated) up_panel.fill(w, N + n, count);
    for (int64_t m = 0; m < M; m += BAND) {
      float part[BAND * PANEL], up[BAND * PANEL];
      meet(part, rows, m, panel, w, n, count);
      if (gated) meet(up, rows, m, up_panel, w, N + n, count);
      activate(part, BAND * PANEL, activation);
      for (int64_t r = 0; r < std::min(BAND, M - m); r++)
        for (int64_t c = 0; c < count; c++) {
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
