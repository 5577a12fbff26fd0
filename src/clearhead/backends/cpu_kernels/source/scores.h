// What happens to the scaled scores of a query before the softmax, and to its sum: softcap, temperature, bias and sinks,
// in the order of attention_steps in model/attend.py. Shapes as in heads.h.
#pragma once
#include "heads.h"

constexpr float MASKED = -3e38f;  // below every score

// What is added to and multiplied with the scores of one query: its temperature, and the biases of its slots or null.
struct ScoreTerms {
  float temperature;
  const float* bias;
};

// Turn the scaled scores of `count` slots into those that the softmax takes. It is never inlined, so that all rows get
// the same bits.
[[gnu::noinline]] inline void adjust_scores(float* row, int64_t count, const Heads& heads, const ScoreTerms& terms) {
  const float before = heads.caps_last ? terms.temperature : 1, after = heads.caps_last ? 1 : terms.temperature;
  if (heads.softcap > 0)
    for (int64_t i = 0; i < count; i++)
      row[i] = heads.softcap * (1 - 2 / (1 + exponential(2 * before / heads.softcap * row[i]))) * after;
  else if (terms.temperature != 1)
    for (int64_t i = 0; i < count; i++) row[i] *= terms.temperature;
  for (int64_t i = 0; terms.bias && i < count; i++) row[i] += terms.bias[i];
}

inline bool adjusts_scores(const Heads& heads, const ScoreTerms& terms) {
  return heads.softcap > 0 || terms.temperature != 1 || terms.bias;
}

// Return the weight of the sink of head n, which joins a softmax whose largest score is `largest`.
inline float sink_weight(const Heads& heads, int64_t n, float largest) {
  return heads.sinks ? exponential(heads.sinks[n] - largest) : 0;
}
