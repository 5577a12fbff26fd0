// The layout of packed tokens: new tokens of many sequences in one row (cache/packed_cache.py), the pages of a layer,
// and how the attention of a call is divided among the threads.
#pragma once
#include "attention.h"

constexpr int64_t SPAN = 64, BAND_TOKENS = 32;
constexpr int64_t BLOCK = 16;  // slots that are always adjacent in memory: page sizes are multiples of it

// The layout of a call; T tokens of B sequences.
struct PackedBatch {
  int64_t num_sequences, num_tokens, page_size, table_stride;
  const int64_t *positions, *slots;        // (T,), in the sequence and in the storage
  const int32_t *starts, *lengths, *tables;  // (B + 1,), (B,), (B, table_stride)
};

// Keys and values (num_pages, K, page_size, H) of a layer, and which earlier tokens a token attends to.
struct PageView {
  void *keys, *values;
  int64_t is_bfloat16;
  int64_t window, chunk;       // tokens of a sliding window or of a chunk; 0: all earlier tokens
  const float *cosine, *sine;  // (positions, rotary_pairs)
  const float* bias;           // (N, bias_length) or null; that of distance d is at bias_length - 1 - d
  int64_t bias_length;
  const float* temperatures;   // (positions,) or null

  int64_t first_slot(int64_t position) const {
    return window ? std::max<int64_t>(0, position - window + 1) : chunk ? position / chunk * chunk : 0;
  }

  // What is done to the scores of query head n at `position`, for the slots from s on.
  ScoreTerms terms(int64_t n, int64_t position, int64_t s) const {
    return {temperatures ? temperatures[position] : 1,
            bias ? bias + (n + 1) * bias_length - 1 - position + s : nullptr};
  }
};

// New tokens of one sequence that are processed together, and the work of one of their key-value heads.
struct Band {
  int64_t sequence, token, count;  // tokens [token, token + count) of the call
  int64_t cost;
};

// How the attention of a call is divided among the threads.
struct AttentionSchedule {
  std::vector<Band> bands;
  std::vector<int64_t> costs;  // of all bands up to each one
  int64_t max_spans = 0;       // in any band
  bool has_prompt = false;     // a sequence has several new tokens

  AttentionSchedule(const PackedBatch& batch) {
    int64_t total = 0;
    for (int64_t b = 0; b < batch.num_sequences; b++)
      for (int64_t t = batch.starts[b]; t < batch.starts[b + 1]; t += BAND_TOKENS) {
        const int64_t count = std::min<int64_t>(BAND_TOKENS, batch.starts[b + 1] - t);
        const int64_t spans = batch.positions[t + count - 1] / SPAN + 1;
        has_prompt |= count > 1;
        max_spans = std::max(max_spans, spans);
        bands.push_back({b, t, count, spans * (count + 2)});  // loading a span takes as long as two tokens
        costs.push_back(total += bands.back().cost);
      }
  }

  // Return whether single spans are divided among the threads, because there are too few bands.
  bool divides_spans(const Thread& thread, const Heads& heads) const {
    return !has_prompt && max_spans > 1 && int64_t(bands.size()) * heads.K < 4 * thread.count;
  }

  // Return the first of the tasks (band, key-value head) of thread `number`.
  int64_t first_task(int64_t number, const Thread& thread, int64_t K) const {
    const int64_t goal = costs.back() * K * number / thread.count;
    const int64_t band = std::upper_bound(costs.begin(), costs.end(), goal / K) - costs.begin();
    if (band == int64_t(bands.size())) return band * K;
    const int64_t before = (costs[band] - bands[band].cost) * K;
    return band * K + (goal - before + bands[band].cost - 1) / bands[band].cost;
  }

  // Return the floats that `states` needs.
  int64_t state_size(const Heads& heads) const {
    return has_prompt ? 0 : int64_t(bands.size()) * heads.N * max_spans * (heads.H + 2);
  }
};
