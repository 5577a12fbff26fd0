// New tokens of each row through all layers: the loop of model/block.py, with its linear layers merged and every thread
// going through the whole of it. What Python calls stands at the end; the structures are mirrored in cpu.py.
#include "prompt.h"

struct Layer {
  int32_t placement;  // 0 pre: x + f(n x); 1 post: n(x + f x); 2 sandwich: x + n'(f(n x))
  Activation activation;
  int32_t gated, looks_across;
  Heads heads, cross_heads;
  Norm norms[3], branch_norms[3];  // of attention, cross-attention, feed-forward
  Matrix projected, output, cross_query, cross_output, inner, down;
};

struct Space {  // what the threads share while they work
  float *x, *projected, *mixed, *inner, *branch, *states;
  Rows& rows;
  Seen& seen;
};

template <class Element>
static void unpack(Element* y, const Matrix& w, int64_t n) {
  const uint8_t* values = (const uint8_t*)w.values + n * w.num_groups * (w.kind == EIGHT ? 32 : 16);
  for (int64_t g = 0; g < w.num_groups; g++) {
    const float scale = from_float16(w.scales[n * w.num_groups + g]);
    const float offset = w.offsets ? from_float16(w.offsets[n * w.num_groups + g]) : w.kind == FOUR ? -8 * scale : 0;
    float group[32];
    if (w.kind == EIGHT)
      for (int j = 0; j < 32; j++) group[j] = scale * int8_t(values[g * 32 + j]);
    else
      for (int j = 0; j < 16; j++) {
        group[j] = scale * (values[g * 16 + j] & 15) + offset;
        group[j + 16] = scale * (values[g * 16 + j] >> 4) + offset;
      }
    for (int64_t j = 0; j < std::min<int64_t>(32, w.K - g * 32); j++) write(y[g * 32 + j], group[j]);
  }
}

static const Norm PLAIN{NO_NORM, 0, nullptr, nullptr};

static void product(const Member& me, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                    Activation activation, bool gated, const float* residual, Rows& rows) {
  if (M > most_rows(w))
    linear_many(me, y, x, M, w, norm, activation, gated, residual, rows);
  else if (w.num_groups)
    linear_packed(me, y, x, M, w, norm, activation, gated, residual);
  else
    linear_plain(me, y, x, M, w, norm, activation, gated, residual, rows);
#pragma omp barrier
}

// x <- the residual after a branch whose last product is W `from`.
static void finish(const Member& me, const Layer& layer, int branch, const Space& space, const float* from, const Matrix& w,
                   int64_t M) {
  if (layer.placement == 0) return product(me, space.x, from, M, w, PLAIN, IDENTITY, false, space.x, space.rows);
  const float* residual = layer.placement == 1 ? space.x : nullptr;
  product(me, space.branch, from, M, w, PLAIN, IDENTITY, false, residual, space.rows);
  for (int64_t m = me.first(M); m < me.last(M); m++) {
    float *x = space.x + m * w.N, *y = space.branch + m * w.N;
    if (layer.placement == 1) {
      normalize(x, y, w.N, layer.norms[branch]);
    } else {
      normalize(y, y, w.N, layer.branch_norms[branch]);
      for (int64_t n = 0; n < w.N; n++) x[n] += y[n];
    }
  }
#pragma omp barrier
}

template <class Element>
static void attend_many(const Member& me, const Looks& looks, const Space& space, const Angles& angles) {
  looks.place<Element>(me, space.projected, angles);
#pragma omp barrier
  looks.look<Element>(me, space.mixed, space.projected, (looks.heads.N + 2 * looks.heads.K) * looks.heads.H);
#pragma omp barrier
}

static void run_layer(const Member& me, const Layer& layer, const Kept& kept, const Kept* across, const Angles& angles,
                      const Space& space, int64_t B, int64_t T) {
  const int64_t M = B * T;
  auto before = [&](int branch) -> const Norm& { return layer.placement == 1 ? PLAIN : layer.norms[branch]; };
  product(me, space.projected, space.x, M, layer.projected, before(0), IDENTITY, false, nullptr, space.rows);
  if (T == 1)
    attend(me, space.mixed, space.states, space.projected, B, layer.heads, kept, angles, false);
  else if (kept.is_bfloat16)
    attend_many<Bfloat16>(me, {B, T, false, layer.heads, kept, space.seen}, space, angles);
  else
    attend_many<float>(me, {B, T, false, layer.heads, kept, space.seen}, space, angles);
  finish(me, layer, 0, space, space.mixed, layer.output, M);
  if (layer.looks_across) {
    product(me, space.projected, space.x, M, layer.cross_query, before(1), IDENTITY, false, nullptr, space.rows);
    attend(me, space.mixed, space.states, space.projected, B, layer.cross_heads, *across, angles, true);
    finish(me, layer, 1, space, space.mixed, layer.cross_output, M);
  }
  product(me, space.inner, space.x, M, layer.inner, before(2), layer.activation, layer.gated, nullptr, space.rows);
  finish(me, layer, 2, space, space.inner, layer.down, M);
}

extern "C" {

// So many rows of x meet a plain W sooner here than in PyTorch; and all that a prompt has, where registers are large.
#ifdef CLEARHEAD_VECTORS
int32_t clearhead_max_plain_rows() { return int32_t(TILED); }
int32_t clearhead_supports_prompts() { return 1; }
#else
int32_t clearhead_max_plain_rows() { return 16; }
int32_t clearhead_supports_prompts() { return 0; }
#endif

// Each gives 0, or 1 where memory for what its threads share cannot be had; nothing is changed then.

// x (B, T, D) in and out; kept, across, angles: one for each layer. `across` may be null, and else T is 1.
int32_t clearhead_run_layers(const Layer* layers, int64_t num_layers, const Kept* kept, const Kept* across, const Angles* angles,
                       const Norm* final_norm, float* x, int64_t B, int64_t T) try {
  static thread_local std::vector<float> small;  // kept for the next token; what a prompt takes is given back
  std::vector<float> large, &memory = B * T > FEW ? large : small;
  Rows rows;
  Seen seen;
  int64_t projected = 0, mixed = 0, inner = 0, states = 0, longest = 0;
  for (int64_t i = 0; i < num_layers; i++) {
    const Layer& layer = layers[i];
    projected = std::max({projected, layer.projected.N, layer.looks_across ? layer.cross_query.N : 0});
    mixed = std::max({mixed, layer.output.K, layer.looks_across ? layer.cross_output.K : 0});
    inner = std::max(inner, layer.down.K);
    states = std::max(states, state_size(layer.heads, kept[i], B));
    if (layer.looks_across) states = std::max(states, state_size(layer.cross_heads, across[i], B));
    if (T > 1) seen.reserve(B, layer.heads, kept[i]);
    for (const Matrix* w : {&layer.projected, &layer.output, &layer.inner, &layer.down, &layer.cross_query, &layer.cross_output})
      if (shares_rows(B * T, *w)) longest = std::max(longest, words_of(*w));
  }
  const int64_t D = layers[0].projected.K, M = B * T;
  rows.reserve(M, longest);
  memory.resize(std::max<size_t>(memory.size(), M * (projected + mixed + inner + D) + states));
  Space space{x, memory.data(), nullptr, nullptr, nullptr, nullptr, rows, seen};
  space.mixed = space.projected + M * projected;
  space.inner = space.mixed + M * mixed;
  space.branch = space.inner + M * inner;
  space.states = space.branch + M * D;
#pragma omp parallel
  {
    const Member me;
    for (int64_t i = 0; i < num_layers; i++)
      run_layer(me, layers[i], kept[i], across ? across + i : nullptr, angles[i], space, B, T);
    for (int64_t m = me.first(M); m < me.last(M); m++) normalize(x + m * D, x + m * D, D, *final_norm);
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// The parts alone: the head, models that these layers do not describe, and tests.
int32_t clearhead_linear(float* y, const float* x, int64_t M, const Matrix* w, const Norm* norm, int32_t activation,
                         int32_t gated, const float* residual) try {
  Rows rows;
  if (shares_rows(M, *w)) rows.reserve(M, words_of(*w));
#pragma omp parallel
  product(Member(), y, x, M, *w, *norm, Activation(activation), gated, residual, rows);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

int32_t clearhead_attend_token(float* y, const float* projected, int64_t B, const Heads* heads, const Kept* kept,
                         const Angles* angles, int32_t across) try {
  std::vector<float> states(state_size(*heads, *kept, B));
#pragma omp parallel
  attend(Member(), y, states.data(), projected, B, *heads, *kept, *angles, across);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// q, y (B, T, N H)
int32_t clearhead_attend_prompt(float* y, const float* q, int64_t B, int64_t T, const Heads* heads, const Kept* kept,
                              int32_t across) try {
  Seen seen;
  seen.reserve(B, *heads, *kept);
  const Looks looks{B, T, across != 0, *heads, *kept, seen};
#pragma omp parallel
  {
    if (kept->is_bfloat16)
      looks.look<Bfloat16>(Member(), y, q, heads->N * heads->H);
    else
      looks.look<float>(Member(), y, q, heads->N * heads->H);
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// W as numbers, for the token table and for gradients; y (N, K) of bfloat16 or float32.
int32_t clearhead_unpack(void* y, const Matrix* w, int32_t as_bfloat16) {
#pragma omp parallel
  {
    const Member me;
    for (int64_t n = me.first(w->N); n < me.last(w->N); n++) {
      if (as_bfloat16)
        unpack((Bfloat16*)y + n * w->K, *w, n);
      else
        unpack((float*)y + n * w->K, *w, n);
    }
  }
  return 0;
}
}
