// Attention of one new token per sequence: rotate its query and key, store its key and value in the cache, and compute
// softmax(q K^T) V over the slots in use. The reference in PyTorch is model/attention.py.
//
// Shapes: B sequences, N heads, K key-value heads, H head width, S slots in use. The slots are divided into spans, so
// that several threads can work on one head. Each span yields a state (its maximum, sum and output, H + 2 floats), and
// the states are joined at the end (Flash-Decoding, Dao et al. 2023).
#pragma once
#include "linear.h"
#include "scores.h"
#include "tiles.h"

constexpr int64_t MAX_SPAN = 256;

// Read and write an element of a cache, which holds floats or bfloat16 values.
inline float read(float x) { return x; }
inline float read(Bfloat16 x) { return from_bfloat16(x.bits); }
inline void write(float& place, float x) { place = x; }
inline void write(Bfloat16& place, float x) { place.bits = to_bfloat16(x); }

// The keys and values of a layer (B, K, capacity, H). The H values of a slot are contiguous.
struct KeyValueView {
  void *keys, *values;
  int64_t row_stride, head_stride, slot_stride;  // in elements
  int64_t slot, S;                               // slot of the first new token; slots in use, including the new ones
  const uint8_t* allowed;                        // mask (B, T, S), or null: all slots up to the token itself
  int64_t is_bfloat16;
  const float* bias;  // of query head n of token t of sequence b and slot s: b row_stride + n head_stride + t
                      // token_stride + s; or null
  int64_t bias_row_stride, bias_head_stride, bias_token_stride;
  const float* temperatures;  // (B or 1, T), or null
  int64_t temperature_row_stride;

  // What is done to the scores of query head n of token t of sequence b, for the slots from s on.
  ScoreTerms terms(int64_t b, int64_t n, int64_t t, int64_t s) const {
    return {temperatures ? temperatures[b * temperature_row_stride + t] : 1,
            bias ? bias + b * bias_row_stride + n * bias_head_stride + t * bias_token_stride + s : nullptr};
  }
};

// Compute the scores of a few keys for `rows` queries.
template <int rows, int keys, class Element>
inline void score(float* scores, const float* q, const Element* key, int64_t slot_stride, int64_t H) {
  Vector sums[rows][keys] = {};
  CLEARHEAD_UNROLL
  for (int k = 0; k < keys; k++)
    for (int64_t h = 0; h + 16 <= H; h += 16) {
      const Vector part = load(key + k * slot_stride + h);
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++) sums[r][k] += load(q + r * H + h) * part;
    }
  for (int r = 0; r < rows; r++) {
    float* row = scores + r * MAX_SPAN;
    sum_vectors(row, sums[r]);
    for (int64_t h = H / 16 * 16; h < H; h++)
      for (int k = 0; k < keys; k++) row[k] += q[r * H + h] * read(key[k * slot_stride + h]);
  }
}

// Compute the states of `rows` query heads over `count` slots. The terms are those of the first; the biases of the next
// are head_stride further. Values are prefetched to the second-level cache while
// keys are read; the processor prefetches the keys itself, since they are read in order.
template <int rows, class Element>
void attend_span(float* state, const float* q, const Element* keys, const Element* values, int64_t slot_stride,
                 const Heads& heads, const uint8_t* allowed, int64_t count, ScoreTerms terms, int64_t head_stride) {
  const int64_t H = heads.H;
  float scores[rows * MAX_SPAN];
  for (int64_t i = 0; i < count; i += 4) {
    const int64_t end = std::min(i + 4, count);
    for (int64_t j = i; j < end; j++)
      for (int64_t h = 0; h < H; h += 64 / int64_t(sizeof(Element)))
        __builtin_prefetch(values + j * slot_stride + h, 0, 2);
    if (end == i + 4)
      score<rows, 4>(scores + i, q, keys + i * slot_stride, slot_stride, H);
    else
      for (int64_t j = i; j < end; j++) score<rows, 1>(scores + j, q, keys + j * slot_stride, slot_stride, H);
  }
  for (int r = 0; r < rows; r++) {
    float *row = scores + r * MAX_SPAN, *out = state + r * (H + 2), sum = 0;
    for (int64_t i = 0; i < count; i++) row[i] *= heads.scale;
    if (adjusts_scores(heads, terms)) adjust_scores(row, count, heads, terms);
    if (terms.bias) terms.bias += head_stride;
    for (int64_t i = 0; allowed && i < count; i++) row[i] = allowed[i] ? row[i] : MASKED;
    const float largest = max_of(row, count);
    for (int64_t i = 0; i < count; i++) {
      row[i] = row[i] == MASKED ? 0 : exponential(row[i] - largest);
      sum += row[i];
    }
    out[0] = largest;
    out[1] = sum;
  }
  int64_t h = 0;
  for (; h + PANEL <= H; h += PANEL)
    multiply_float_panel<rows>(state + 2 + h, H + 2, scores, MAX_SPAN, values + h, slot_stride, count);
  for (; h < H; h++)
    for (int r = 0; r < rows; r++) {
      float sum = 0;
      for (int64_t i = 0; i < count; i++) sum += scores[r * MAX_SPAN + i] * read(values[i * slot_stride + h]);
      state[r * (H + 2) + 2 + h] = sum;
    }
}

// Join the states of the spans of head n, which are `stride` floats apart, to y (H,).
inline void join_states(float* y, const float* states, int64_t spans, int64_t stride, const Heads& heads, int64_t n) {
  const int64_t H = heads.H;
  float largest = MASKED, sum = 0;
  for (int64_t i = 0; i < spans; i++) largest = std::max(largest, states[i * stride]);
  std::fill(y, y + H, 0.f);
  for (int64_t i = 0; i < spans; i++) {
    const float* part = states + i * stride;
    const float weight = part[0] == MASKED ? 0 : exponential(part[0] - largest);
    sum += weight * part[1];
    for (int64_t h = 0; h < H; h++) y[h] += weight * part[2 + h];
  }
  if (sum != 0) sum += sink_weight(heads, n, largest);
  for (int64_t h = 0; h < H; h++) y[h] = sum == 0 ? 0 : y[h] / sum;  // all masked: zeros, as in model/attend.py
}

// Store key and value of head k of token t of sequence b. `row` ((N + 2K) H): its queries, keys and values.
template <class Element>
void store_key_value(const float* row, int64_t b, int64_t t, int64_t k, const Heads& heads, const KeyValueView& cache,
                     const RotationAngles& angles) {
  const int64_t H = heads.H, slot = cache.slot + t;
  const int64_t place = b * cache.row_stride + k * cache.head_stride + slot * cache.slot_stride;
  thread_local std::vector<float> rotated;
  rotated.resize(H);
  norm_and_rotate(rotated.data(), row + (heads.N + k) * H, heads, heads.key_norm, angles, b, t);
  for (int64_t h = 0; h < H; h++) {
    write(((Element*)cache.keys)[place + h], rotated[h]);
    write(((Element*)cache.values)[place + h], row[(heads.N + heads.K + k) * H + h]);
  }
}

// The division of the slots: short enough to give every thread work, but at least 32 slots.
struct Spans {
  int64_t length, count;
  Spans(const KeyValueView& cache, int64_t num_threads) {
    const int64_t share = (cache.S + 2 * num_threads - 1) / (2 * num_threads);
    length = std::clamp<int64_t>((share + 15) / 16 * 16, 32, MAX_SPAN);
    count = (cache.S + length - 1) / length;
  }
};

// Return the floats needed for all states. Fewer threads than the maximum make fewer spans.
inline int64_t state_size(const Heads& heads, const KeyValueView& cache, int64_t B) {
  return B * heads.N * Spans(cache, omp_get_max_threads()).count * (heads.H + 2);
}

// Compute the states of this thread's spans. `projected` (B, (N + 2K) H) holds queries, keys and values side by side.
// For cross-attention it holds only queries (B, N H), and nothing is stored. The span that contains the new slot writes
// it first; no other span reads it.
template <class Element>
void attend_spans(const Thread& thread, float* states, const float* projected, int64_t B, const Heads& heads,
                  const KeyValueView& cache, const RotationAngles& angles, bool is_cross_attention) {
  const Spans spans(cache, thread.count);
  const int64_t group = heads.N / heads.K, H = heads.H, stride = group * (H + 2);
  const int64_t width = (heads.N + (is_cross_attention ? 0 : 2 * heads.K)) * H, tasks = B * heads.K * spans.count;
  thread_local std::vector<float> q;
  q.resize(group * H);
  for (int64_t task = thread.first(tasks); task < thread.last(tasks); task++) {
    const int64_t span = task % spans.count, k = task / spans.count % heads.K, b = task / spans.count / heads.K;
    const int64_t first = span * spans.length, last = std::min(first + spans.length, cache.S);
    if (!is_cross_attention && first <= cache.slot && cache.slot < last)
      store_key_value<Element>(projected + b * width, b, 0, k, heads, cache, angles);
    for (int64_t n = 0; n < group; n++)
      norm_and_rotate(&q[n * H], projected + b * width + (k * group + n) * H, heads, heads.query_norm, angles, b, 0);
    const int64_t place = b * cache.row_stride + k * cache.head_stride + first * cache.slot_stride;
    const Element *keys = (const Element*)cache.keys + place, *values = (const Element*)cache.values + place;
    const uint8_t* allowed = cache.allowed ? cache.allowed + b * cache.S + first : nullptr;
    for (int64_t n = 0; n < group;) {  // up to four query heads share the reading of a key
      const int64_t rows = std::min<int64_t>(group - n, 4);
      auto* run = rows == 4   ? attend_span<4, Element>
                  : rows == 3 ? attend_span<3, Element>
                  : rows == 2 ? attend_span<2, Element>
                              : attend_span<1, Element>;
      run(states + task * stride + n * (H + 2), &q[n * H], keys, values, cache.slot_stride, heads, allowed,
          last - first, cache.terms(b, k * group + n, 0, first), cache.bias_head_stride);
      n += rows;
    }
  }
}

// Join the states of this thread's heads to y (B, N H).
inline void join_spans(const Thread& thread, float* y, const float* states, int64_t B, const Heads& heads,
                       const KeyValueView& cache) {
  const int64_t spans = Spans(cache, thread.count).count, group = heads.N / heads.K;
  const int64_t stride = group * (heads.H + 2), total = B * heads.N;
  for (int64_t row = thread.first(total); row < thread.last(total); row++) {
    const int64_t b = row / heads.N, n = row % heads.N;
    const float* first = states + (b * heads.K + n / group) * spans * stride + n % group * (heads.H + 2);
    join_states(y + row * heads.H, first, spans, stride, heads, n);
  }
}

// Compute y (B, N H); called by all threads.
inline void attend_token(const Thread& thread, float* y, float* states, const float* projected, int64_t B,
                         const Heads& heads, const KeyValueView& cache, const RotationAngles& angles,
                         bool is_cross_attention) {
  if (cache.is_bfloat16)
    attend_spans<Bfloat16>(thread, states, projected, B, heads, cache, angles, is_cross_attention);
  else
    attend_spans<float>(thread, states, projected, B, heads, cache, angles, is_cross_attention);
#pragma omp barrier
  join_spans(thread, y, states, B, heads, cache);
#pragma omp barrier
}
