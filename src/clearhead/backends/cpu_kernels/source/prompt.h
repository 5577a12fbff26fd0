// Attention of all tokens of a prompt: T tokens of each of B sequences. The time is that of the multiplications. Keys
// are transposed to panels, as W is in products. References and shapes as in attention.h.
#pragma once
#include "attention.h"

// Round up to whole panels.
inline int64_t round_up(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// Keys and values of all sequences and heads as floats, shared by all threads: keys (B, K, S/PANEL, H, PANEL), so that
// a vector holds the same entry of 16 keys; values (B, K, S, H). S, and H of the values, are padded to whole panels.
struct FloatKeysValues {
  AlignedVector<float> keys, values;

  void reserve(int64_t B, const Heads& heads, const KeyValueView& cache) {
    const size_t slots = B * heads.K * round_up(cache.S);
    keys.resize(std::max(keys.size(), slots * heads.H));
    values.resize(std::max(values.size(), slots * round_up(heads.H)));
  }
};

// Turn scores (rows, S) of head n into unnormalized softmax weights, and compute their sums. Row r attends to slots
// below ends[r].
inline void exponentiate_scores(float* scores, float* sums, const int64_t* ends, int64_t rows, int64_t S,
                                const uint8_t* allowed, int64_t num_slots, const Heads& heads, int64_t n) {
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
    sums[r] = sum == 0 ? 0 : sum + sink_weight(heads, n, largest);
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
    thread_local AlignedVector<float> queries, scores, out;
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
    for (int64_t r = 0; r < rows; r++) {
      const ScoreTerms terms = cache.terms(b, n, t + r, 0);
      if (adjusts_scores(heads, terms)) adjust_scores(&scores[r * S], ends[r], heads, terms);
    }
    exponentiate_scores(scores.data(), sums, ends, rows, S, allowed, cache.S, heads, n);
    for (int64_t h = 0; h < H; h += PANEL)
      multiply_float_panel<BAND>(&out[h], round_up(H), scores.data(), S, values + h, round_up(H), last_end);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t h = 0; h < H; h++)
        y[((b * T + t + r) * heads.N + n) * H + h] = sums[r] == 0 ? 0 : out[r * round_up(H) + h] / sums[r];
  }
};
