// The heads of an attention layer: what happens to queries, keys and values between their projection and the scores.
// The reference in PyTorch is Attention.project and norm_and_rotate in model/attention.py.
//
// Shapes: N heads, K key-value heads, H head width.
#pragma once
#include "linear.h"

struct Heads {
  int32_t N, K, H, rotary_pairs;
  int32_t interleaved;  // rotated pairs are (0, 1), (2, 3), ...; otherwise (0, pairs), (1, pairs + 1), ...
  float scale;
  Norm query_norm, key_norm;          // of one head, with the same weight for all
  int32_t norm_after_rotation;        // where query_norm and key_norm are applied
  int32_t is_joint;                   // whether the row norms normalize all heads as one vector, or one by one
  float clip;                         // clamp queries, keys and values to +- clip; 0: not at all
  Norm row_query_norm, row_key_norm;  // with a weight for each head (N or K, H), before the rotation
  float softcap;                      // scores become softcap tanh(score / softcap); 0: not at all
  int32_t caps_last;                  // whether temperatures multiply the scores before the cap, or after it
  const float* sinks;                 // (N,) scores that join each softmax and are then dropped, or null
};

struct RotationAngles {
  const float *cosine, *sine;  // (B or 1, T, rotary_pairs)
  int64_t row_stride;          // 0 if all sequences share them
};

// Clip and normalize the queries, keys and values of this thread's rows of `projected` (M, num_heads H), in place;
// called by all threads. With cross-attention, a row holds queries only.
inline void prepare_heads(const Thread& thread, float* projected, int64_t M, const Heads& heads, int64_t num_heads) {
  if (heads.clip == 0 && heads.row_query_norm.kind == NO_NORM) return;
  const int64_t H = heads.H, width = num_heads * H;
  auto normalize_heads = [&](float* row, int64_t count, Norm norm) {
    if (heads.is_joint) return normalize(row, row, count * H, norm);
    for (int64_t n = 0; n < count; n++, row += H, norm.weight += H) normalize(row, row, H, norm);
  };
  for (int64_t m = thread.first(M); m < thread.last(M); m++) {
    float* row = projected + m * width;
    for (int64_t i = 0; heads.clip > 0 && i < width; i++) row[i] = std::clamp(row[i], -heads.clip, heads.clip);
    if (heads.row_query_norm.kind == NO_NORM) continue;
    normalize_heads(row, heads.N, heads.row_query_norm);
    if (num_heads > heads.N) normalize_heads(row + heads.N * H, heads.K, heads.row_key_norm);
  }
#pragma omp barrier
}

// Normalize and rotate one head of token t of sequence b; y may be x.
inline void norm_and_rotate(float* y, const float* x, const Heads& heads, const Norm& norm,
                            const RotationAngles& angles, int64_t b, int64_t t) {
  const Norm none{NO_NORM, 0, nullptr, nullptr};
  normalize(y, x, heads.H, heads.norm_after_rotation ? none : norm);
  const int64_t place = b * angles.row_stride + t * heads.rotary_pairs;
  const float *cosine = angles.cosine + place, *sine = angles.sine + place;
  const int64_t step = heads.interleaved ? 2 : 1, other = heads.interleaved ? 1 : heads.rotary_pairs;
  for (int64_t j = 0; j < heads.rotary_pairs; j++) {
    const float u = y[j * step], v = y[j * step + other];
    y[j * step] = u * cosine[j] - v * sine[j];
    y[j * step + other] = v * cosine[j] + u * sine[j];
  }
  if (heads.norm_after_rotation) normalize(y, y, heads.H, norm);
}
