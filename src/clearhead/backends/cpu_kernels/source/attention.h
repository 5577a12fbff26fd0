// One new token of each row looks at all that is kept: rotate its query and key, put key and value in their slot, and
// softmax(q K) V over the slots in use only. Twin in PyTorch: model/attention.py.
//
// Shapes: B rows, N heads, K key-value heads, H head width, S slots in use. The slots are cut into spans, so that
// threads share even one head; each span leaves its own maximum, sum and output, and they are joined at the end
// (the split of Flash-Decoding, Dao et al. 2023).
#pragma once
#include "linear.h"
#include "tiles.h"

constexpr int64_t LONGEST_SPAN = 256;
constexpr float NOTHING = -3e38f;  // below every score: nothing seen yet

inline float read(float x) { return x; }
inline float read(Bfloat16 x) { return from_bfloat16(x.bits); }
inline void write(float& place, float x) { place = x; }
inline void write(Bfloat16& place, float x) { place.bits = to_bfloat16(x); }

struct Heads {
  int32_t N, K, H, rotary_pairs;
  int32_t neighbours;  // pairs are (0, 1), (2, 3) …; otherwise (0, pairs), (1, pairs + 1) …
  float scale;
  Norm query_norm, key_norm;
};

// Where a layer keeps its keys and values, (B, K, capacity, H); the H of a slot stand side by side.
struct Kept {
  void *keys, *values;
  int64_t row_stride, head_stride, slot_stride;  // in elements
  int64_t slot, S;                  // where the first new token goes; slots in use, the new ones included
  const uint8_t* allowed;           // (B, T, S), or null: all up to the token itself
  int64_t is_bfloat16;
};

struct Angles {
  const float *cosine, *sine;  // (B or 1, T, rotary_pairs)
  int64_t row_stride;          // 0 where all rows share them
};

// Token t of row b; y may be x.
inline void place_head(float* y, const float* x, const Heads& heads, const Norm& norm, const Angles& angles, int64_t b,
                       int64_t t) {
  normalize(y, x, heads.H, norm);
  const int64_t place = b * angles.row_stride + t * heads.rotary_pairs;
  const float *cosine = angles.cosine + place, *sine = angles.sine + place;
  const int64_t step = heads.neighbours ? 2 : 1, other = heads.neighbours ? 1 : heads.rotary_pairs;
  for (int64_t j = 0; j < heads.rotary_pairs; j++) {
    const float u = y[j * step], v = y[j * step + other];
    y[j * step] = u * cosine[j] - v * sine[j];
    y[j * step + other] = v * cosine[j] + u * sine[j];
  }
}

// Scores of a few keys under `rows` queries.
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
    float* row = scores + r * LONGEST_SPAN;
    totals(row, sums[r]);
    for (int64_t h = H / 16 * 16; h < H; h++)
      for (int k = 0; k < keys; k++) row[k] += q[r * H + h] * read(key[k * slot_stride + h]);
  }
}

// `rows` query heads over `count` slots: maximum, sum and output of each. Values come to the second-level cache while
// keys are read; keys, one after the other, the processor sends for itself.
template <int rows, class Element>
void look(float* state, const float* q, const Element* keys, const Element* values, int64_t slot_stride, const Heads& heads,
          const uint8_t* allowed, int64_t count) {
  const int64_t H = heads.H;
  float scores[rows * LONGEST_SPAN];
  for (int64_t i = 0; i < count; i += 4) {
    const int64_t end = std::min(i + 4, count);
    for (int64_t j = i; j < end; j++)
      for (int64_t h = 0; h < H; h += 64 / int64_t(sizeof(Element))) __builtin_prefetch(values + j * slot_stride + h, 0, 2);
    if (end == i + 4)
      score<rows, 4>(scores + i, q, keys + i * slot_stride, slot_stride, H);
    else
      for (int64_t j = i; j < end; j++) score<rows, 1>(scores + j, q, keys + j * slot_stride, slot_stride, H);
  }
  for (int r = 0; r < rows; r++) {
    float *row = scores + r * LONGEST_SPAN, *out = state + r * (H + 2), sum = 0;
    for (int64_t i = 0; i < count; i++) row[i] = allowed && !allowed[i] ? NOTHING : row[i] * heads.scale;
    const float largest = largest_of(row, count);
    for (int64_t i = 0; i < count; i++) {
      row[i] = row[i] == NOTHING ? 0 : exponential(row[i] - largest);
      sum += row[i];
    }
    out[0] = largest;
    out[1] = sum;
  }
  int64_t h = 0;
  for (; h + PANEL <= H; h += PANEL)
    meet_floats<rows>(state + 2 + h, H + 2, scores, LONGEST_SPAN, values + h, slot_stride, count);
  for (; h < H; h++)
    for (int r = 0; r < rows; r++) {
      float mixed = 0;
      for (int64_t i = 0; i < count; i++) mixed += scores[r * LONGEST_SPAN + i] * read(values[i * slot_stride + h]);
      state[r * (H + 2) + 2 + h] = mixed;
    }
}

inline void join(float* y, const float* states, int64_t spans, int64_t stride, int64_t H) {
  float largest = NOTHING, sum = 0;
  for (int64_t i = 0; i < spans; i++) largest = std::max(largest, states[i * stride]);
  std::fill(y, y + H, 0.f);
  for (int64_t i = 0; i < spans; i++) {
    const float* part = states + i * stride;
    const float weight = part[0] == NOTHING ? 0 : exponential(part[0] - largest);
    sum += weight * part[1];
    for (int64_t h = 0; h < H; h++) y[h] += weight * part[2 + h];
  }
  for (int64_t h = 0; h < H; h++) y[h] = sum == 0 ? 0 : y[h] / sum;  // nothing to see: zeros, as in model/attend.py
}

// Key and value k of token t of row b; `row` ((N + 2K) H) is what was projected of it.
template <class Element>
void keep(const float* row, int64_t b, int64_t t, int64_t k, const Heads& heads, const Kept& kept, const Angles& angles) {
  const int64_t H = heads.H, place = b * kept.row_stride + k * kept.head_stride + (kept.slot + t) * kept.slot_stride;
  thread_local std::vector<float> turned;
  turned.resize(H);
  place_head(turned.data(), row + (heads.N + k) * H, heads, heads.key_norm, angles, b, t);
  for (int64_t h = 0; h < H; h++) {
    write(((Element*)kept.keys)[place + h], turned[h]);
    write(((Element*)kept.values)[place + h], row[(heads.N + heads.K + k) * H + h]);
  }
}

// Short enough that there is something for every thread to do: 32 slots at least.
struct Spans {
  int64_t length, count;
  Spans(const Kept& kept, int64_t num_threads) {
    const int64_t share = (kept.S + 2 * num_threads - 1) / (2 * num_threads);
    length = std::clamp<int64_t>((share + 15) / 16 * 16, 32, LONGEST_SPAN);
    count = (kept.S + length - 1) / length;
  }
};

// Enough for whatever number of threads comes: fewer of them cut into fewer spans.
inline int64_t state_size(const Heads& heads, const Kept& kept, int64_t B) {
  return B * heads.N * Spans(kept, omp_get_max_threads()).count * (heads.H + 2);
}

// The spans of this thread. `projected` (B, (N + 2K) H) holds queries, keys, values side by side, or with `across` (B, N H)
// queries alone: then nothing is kept. The span that holds the new slot writes it first; no other span reads it.
template <class Element>
void look_at_spans(const Member& me, float* states, const float* projected, int64_t B, const Heads& heads, const Kept& kept,
                   const Angles& angles, bool across) {
  const Spans spans(kept, me.count);
  const int64_t group = heads.N / heads.K, H = heads.H, stride = group * (H + 2);
  const int64_t width = (heads.N + (across ? 0 : 2 * heads.K)) * H, tasks = B * heads.K * spans.count;
  thread_local std::vector<float> q;
  q.resize(group * H);
  for (int64_t task = me.first(tasks); task < me.last(tasks); task++) {
    const int64_t span = task % spans.count, k = task / spans.count % heads.K, b = task / spans.count / heads.K;
    const int64_t first = span * spans.length, last = std::min(first + spans.length, kept.S);
    if (!across && first <= kept.slot && kept.slot < last) keep<Element>(projected + b * width, b, 0, k, heads, kept, angles);
    for (int64_t n = 0; n < group; n++)
      place_head(&q[n * H], projected + b * width + (k * group + n) * H, heads, heads.query_norm, angles, b, 0);
    const int64_t place = b * kept.row_stride + k * kept.head_stride + first * kept.slot_stride;
    const Element *keys = (const Element*)kept.keys + place, *values = (const Element*)kept.values + place;
    const uint8_t* allowed = kept.allowed ? kept.allowed + b * kept.S + first : nullptr;
    for (int64_t n = 0; n < group;) {  // up to four heads read a key together
      const int64_t rows = std::min<int64_t>(group - n, 4);
      auto* one = rows == 4 ? look<4, Element> : rows == 3 ? look<3, Element> : rows == 2 ? look<2, Element> : look<1, Element>;
      one(states + task * stride + n * (H + 2), &q[n * H], keys, values, kept.slot_stride, heads, allowed, last - first);
      n += rows;
    }
  }
}

inline void join_spans(const Member& me, float* y, const float* states, int64_t B, const Heads& heads, const Kept& kept) {
  const int64_t spans = Spans(kept, me.count).count, group = heads.N / heads.K, stride = group * (heads.H + 2), total = B * heads.N;
  for (int64_t row = me.first(total); row < me.last(total); row++) {
    const int64_t b = row / heads.N, n = row % heads.N;
    const float* first = states + (b * heads.K + n / group) * spans * stride + n % group * (heads.H + 2);
    join(y + row * heads.H, first, spans, stride, heads.H);
  }
}

// All threads together; y (B, N H).
inline void attend(const Member& me, float* y, float* states, const float* projected, int64_t B, const Heads& heads,
                   const Kept& kept, const Angles& angles, bool across) {
  if (kept.is_bfloat16)
    look_at_spans<Bfloat16>(me, states, projected, B, heads, kept, angles, across);
  else
    look_at_spans<float>(me, states, projected, B, heads, kept, angles, across);
#pragma omp barrier
  join_spans(me, y, states, B, heads, kept);
#pragma omp barrier
}
