// One token of each row through all layers: the loop of model/block.py, with its linear layers merged and every thread
// going through the whole of it. What Python calls stands at the end; the structures are mirrored in cpu.py.
#include "attend.h"

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

// x <- the residual after a branch whose last product is W `from`.
static void finish(const Member& me, const Layer& layer, int branch, const Space& space, const float* from, const Matrix& w,
                   int64_t B) {
  if (layer.placement == 0) {
    linear(me, space.x, from, B, w, PLAIN, IDENTITY, false, space.x);
#pragma omp barrier
    return;
  }
  linear(me, space.branch, from, B, w, PLAIN, IDENTITY, false, layer.placement == 1 ? space.x : nullptr);
#pragma omp barrier
  for (int64_t b = me.first(B); b < me.last(B); b++) {
    float *x = space.x + b * w.N, *y = space.branch + b * w.N;
    if (layer.placement == 1) {
      normalize(x, y, w.N, layer.norms[branch]);
    } else {
      normalize(y, y, w.N, layer.branch_norms[branch]);
      for (int64_t n = 0; n < w.N; n++) x[n] += y[n];
    }
  }
#pragma omp barrier
}

static void run_layer(const Member& me, const Layer& layer, const Kept& kept, const Kept* across, const Angles& angles,
                      const Space& space, int64_t B) {
  auto before = [&](int branch) -> const Norm& { return layer.placement == 1 ? PLAIN : layer.norms[branch]; };
  linear(me, space.projected, space.x, B, layer.projected, before(0), IDENTITY, false, nullptr);
#pragma omp barrier
  attend(me, space.mixed, space.states, space.projected, B, layer.heads, kept, angles, false);
  finish(me, layer, 0, space, space.mixed, layer.output, B);
  if (layer.looks_across) {
    linear(me, space.projected, space.x, B, layer.cross_query, before(1), IDENTITY, false, nullptr);
#pragma omp barrier
    attend(me, space.mixed, space.states, space.projected, B, layer.cross_heads, *across, angles, true);
    finish(me, layer, 1, space, space.mixed, layer.cross_output, B);
  }
  linear(me, space.inner, space.x, B, layer.inner, before(2), layer.activation, layer.gated, nullptr);
#pragma omp barrier
  finish(me, layer, 2, space, space.inner, layer.down, B);
}

extern "C" {

// x (B, D) in and out; kept, across, angles: one for each layer, `across` may be null.
void clearhead_step(const Layer* layers, int64_t num_layers, const Kept* kept, const Kept* across, const Angles* angles,
                    const Norm* final_norm, float* x, int64_t B) {
  int64_t projected = 0, mixed = 0, inner = 0, states = 0;
  for (int64_t i = 0; i < num_layers; i++) {
    const Layer& layer = layers[i];
    projected = std::max({projected, layer.projected.N, layer.looks_across ? layer.cross_query.N : 0});
    mixed = std::max({mixed, layer.output.K, layer.looks_across ? layer.cross_output.K : 0});
    inner = std::max(inner, layer.down.K);
    states = std::max(states, state_size(layer.heads, kept[i], B));
    if (layer.looks_across) states = std::max(states, state_size(layer.cross_heads, across[i], B));
  }
  const int64_t D = layers[0].projected.K;
  static thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < B * (projected + mixed + inner + D) + states)
    memory.resize(B * (projected + mixed + inner + D) + states);
  Space space{x, memory.data()};
  space.mixed = space.projected + B * projected;
  space.inner = space.mixed + B * mixed;
  space.branch = space.inner + B * inner;
  space.states = space.branch + B * D;
#pragma omp parallel
  {
    const Member me;
    for (int64_t i = 0; i < num_layers; i++)
      run_layer(me, layers[i], kept[i], across ? across + i : nullptr, angles[i], space, B);
    for (int64_t b = me.first(B); b < me.last(B); b++) normalize(x + b * D, x + b * D, D, *final_norm);
  }
}

// The parts alone: the head, and for tests.
void clearhead_linear(float* y, const float* x, int64_t M, const Matrix* w, const Norm* norm, int32_t activation, int32_t gated,
                      const float* residual) {
#pragma omp parallel
  linear(Member(), y, x, M, *w, *norm, Activation(activation), gated, residual);
}

void clearhead_attend(float* y, const float* projected, int64_t B, const Heads* heads, const Kept* kept, const Angles* angles,
                      int32_t across) {
  std::vector<float> states(state_size(*heads, *kept, B));
#pragma omp parallel
  attend(Member(), y, states.data(), projected, B, *heads, *kept, *angles, across);
}

// W as numbers, for products with many rows; y (N, K) of bfloat16 or float32.
void clearhead_unpack(void* y, const Matrix* w, int32_t as_bfloat16) {
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
}
}
