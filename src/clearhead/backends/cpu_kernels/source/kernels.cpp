// Run new tokens through all layers: the loop of model/block.py with merged linear layers. Every thread runs the whole
// loop and waits at barriers for the others. The functions at the end are called from Python, and structures.py mirrors
// the structures.
//
//     vectors.h     number formats, dot products of quantized groups
//     inputs.h      W, norms, rows of x in the format of W
//     tiles.h       products of a few rows that stay in registers
//     linear.h      y = W norm(x) for few rows of x           prompt.h     the same for many rows, and their attention
//     attention.h   attention of one new token per sequence
//
// Words for pieces of data, from small to large:
//
//     word          32 bits along K: one float, two bfloat16 or four 8-bit integers
//     group         32 quantized values along K that share a scale (and an offset)
//     vector        16 words, one AVX-512 register
//     tile          a few rows of x times a few rows of W, whose sums all stay in registers
//     band, panel   BAND rows of x; PANEL rows of W, transposed, so that a vector holds one word of 16 rows
//     share         the rows of W that a thread takes at a time
//     span, state   a range of cache slots; the softmax maximum, sum and output of a span
#include "prompt.h"

// Where a branch f has its norms n and n': x + f(n x), n(x + f x) or x + n'(f(n x)).
enum Placement : int32_t { PRE, POST, SANDWICH };

struct Layer {
  Placement placement;
  Activation activation;
  int32_t gated, has_cross_attention;
  Heads heads, cross_heads;
  Norm norms[3], branch_norms[3];  // of attention, cross-attention and feed-forward
  Matrix query_key_value, attention_output, cross_query, cross_output, gate_and_up, down;
};

// Memory that the threads share.
struct Workspace {
  float *x, *projected, *attended, *inner, *branch, *states;
  InputRows& rows;
  FloatKeysValues& floats;
};

// Dequantize row n of W. Byte j of an int4 group holds values j and j + 16.
template <class Element>
static void unpack(Element* y, const Matrix& w, int64_t n) {
  const uint8_t* values = (const uint8_t*)w.values + n * w.num_groups * (w.kind == INT8 ? 32 : 16);
  for (int64_t g = 0; g < w.num_groups; g++) {
    const float scale = from_float16(w.scales[n * w.num_groups + g]);
    const float offset = w.offsets ? from_float16(w.offsets[n * w.num_groups + g]) : w.kind == INT4 ? -8 * scale : 0;
    float group[32];
    if (w.kind == INT8)
      for (int j = 0; j < 32; j++) group[j] = scale * int8_t(values[g * 32 + j]);
    else
      for (int j = 0; j < 16; j++) {
        group[j] = scale * (values[g * 16 + j] & 15) + offset;
        group[j + 16] = scale * (values[g * 16 + j] >> 4) + offset;
      }
    for (int64_t j = 0; j < std::min<int64_t>(32, w.K - g * 32); j++) write(y[g * 32 + j], group[j]);
  }
}

static const Norm UNNORMALIZED{NO_NORM, 0, nullptr, nullptr};

// Compute y = activation(W norm(x) + bias) + residual in the way that suits W and the number of rows M; called by all
// threads.
static void linear(const Thread& thread, float* y, const float* x, int64_t M, const Matrix& w, const Norm& norm,
                   Activation activation, bool gated, const float* residual, InputRows& rows) {
  if (M > max_stored_rows(w))
    linear_panels(thread, y, x, M, w, norm, activation, gated, residual, rows);
  else if (w.num_groups)
    linear_packed(thread, y, x, M, w, norm, activation, gated, residual);
  else
    linear_plain(thread, y, x, M, w, norm, activation, gated, residual, rows);
#pragma omp barrier
}

// Add the last product of a branch, W `from`, to the residual stream x, with the norms of the layer's placement.
static void add_branch(const Thread& thread, const Layer& layer, int branch, const Workspace& space, const float* from,
                       const Matrix& w, int64_t M) {
  if (layer.placement == PRE)
    return linear(thread, space.x, from, M, w, UNNORMALIZED, IDENTITY, false, space.x, space.rows);
  const float* residual = layer.placement == POST ? space.x : nullptr;
  linear(thread, space.branch, from, M, w, UNNORMALIZED, IDENTITY, false, residual, space.rows);
  for (int64_t m = thread.first(M); m < thread.last(M); m++) {
    float *x = space.x + m * w.N, *y = space.branch + m * w.N;
    if (layer.placement == POST) {
      normalize(x, y, w.N, layer.norms[branch]);
    } else {
      normalize(y, y, w.N, layer.branch_norms[branch]);
      for (int64_t n = 0; n < w.N; n++) x[n] += y[n];
    }
  }
#pragma omp barrier
}

template <class Element>
static void attend_prompt(const Thread& thread, const PromptAttention& attention, const Workspace& space,
                          const RotationAngles& angles) {
  attention.rotate_and_store<Element>(thread, space.projected, angles);
#pragma omp barrier
  attention.attend<Element>(thread, space.attended, space.projected,
                            (attention.heads.N + 2 * attention.heads.K) * attention.heads.H);
#pragma omp barrier
}

// Run the tokens in space.x through one layer; called by all threads.
static void run_layer(const Thread& thread, const Layer& layer, const KeyValueView& cache,
                      const KeyValueView* cross_cache, const RotationAngles& angles, const Workspace& space, int64_t B,
                      int64_t T) {
  const int64_t M = B * T;
  auto norm_before = [&](int branch) -> const Norm& {
    return layer.placement == POST ? UNNORMALIZED : layer.norms[branch];
  };
  linear(thread, space.projected, space.x, M, layer.query_key_value, norm_before(0), IDENTITY, false, nullptr,
         space.rows);
  if (T == 1)
    attend_token(thread, space.attended, space.states, space.projected, B, layer.heads, cache, angles, false);
  else if (cache.is_bfloat16)
    attend_prompt<Bfloat16>(thread, {B, T, false, layer.heads, cache, space.floats}, space, angles);
  else
    attend_prompt<float>(thread, {B, T, false, layer.heads, cache, space.floats}, space, angles);
  add_branch(thread, layer, 0, space, space.attended, layer.attention_output, M);
  if (layer.has_cross_attention) {
    linear(thread, space.projected, space.x, M, layer.cross_query, norm_before(1), IDENTITY, false, nullptr,
           space.rows);
    attend_token(thread, space.attended, space.states, space.projected, B, layer.cross_heads, *cross_cache, angles,
                 true);
    add_branch(thread, layer, 1, space, space.attended, layer.cross_output, M);
  }
  linear(thread, space.inner, space.x, M, layer.gate_and_up, norm_before(2), layer.activation, layer.gated, nullptr,
         space.rows);
  add_branch(thread, layer, 2, space, space.inner, layer.down, M);
}

extern "C" {

// The number of rows of x up to which products with a plain W are faster here than in PyTorch, and whether prompts are
// faster too, which needs AVX-512.
#ifdef CLEARHEAD_AVX512
int32_t clearhead_max_plain_rows() { return int32_t(MAX_PLAIN_ROWS); }
int32_t clearhead_supports_prompts() { return 1; }
#else
int32_t clearhead_max_plain_rows() { return 16; }
int32_t clearhead_supports_prompts() { return 0; }
#endif

// Each function below returns 0, or 1 if it cannot allocate the memory that its threads share; it then changes nothing.

// Run x (B, T, D) through all layers, in place. caches, cross_caches and angles have one entry per layer. cross_caches
// may be null; otherwise T is 1.
int32_t clearhead_run_layers(const Layer* layers, int64_t num_layers, const KeyValueView* caches,
                             const KeyValueView* cross_caches, const RotationAngles* angles, const Norm* final_norm,
                             float* x, int64_t B, int64_t T) try {
  static thread_local std::vector<float> small;  // reused for the next token; memory for a prompt is freed
  std::vector<float> large, &memory = B * T > MAX_PRIVATE_ROWS ? large : small;
  InputRows rows;
  FloatKeysValues floats;
  int64_t projected = 0, attended = 0, inner = 0, states = 0, longest = 0;
  for (int64_t i = 0; i < num_layers; i++) {
    const Layer& layer = layers[i];
    projected = std::max({projected, layer.query_key_value.N, layer.has_cross_attention ? layer.cross_query.N : 0});
    attended = std::max({attended, layer.attention_output.K, layer.has_cross_attention ? layer.cross_output.K : 0});
    inner = std::max(inner, layer.down.K);
    states = std::max(states, state_size(layer.heads, caches[i], B));
    if (layer.has_cross_attention) states = std::max(states, state_size(layer.cross_heads, cross_caches[i], B));
    if (T > 1) floats.reserve(B, layer.heads, caches[i]);
    for (const Matrix* w : {&layer.query_key_value, &layer.attention_output, &layer.gate_and_up, &layer.down,
                            &layer.cross_query, &layer.cross_output})
      if (shares_rows(B * T, *w)) longest = std::max(longest, words_per_row(*w));
  }
  const int64_t D = layers[0].query_key_value.K, M = B * T;
  rows.reserve(M, longest);
  memory.resize(std::max<size_t>(memory.size(), M * (projected + attended + inner + D) + states));
  Workspace space{x, memory.data(), nullptr, nullptr, nullptr, nullptr, rows, floats};
  space.attended = space.projected + M * projected;
  space.inner = space.attended + M * attended;
  space.branch = space.inner + M * inner;
  space.states = space.branch + M * D;
#pragma omp parallel
  {
    const Thread thread;
    for (int64_t i = 0; i < num_layers; i++)
      run_layer(thread, layers[i], caches[i], cross_caches ? cross_caches + i : nullptr, angles[i], space, B, T);
    for (int64_t m = thread.first(M); m < thread.last(M); m++) normalize(x + m * D, x + m * D, D, *final_norm);
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Single operations, for the logit head, for models that these layers do not describe, and for tests.
int32_t clearhead_linear(float* y, const float* x, int64_t M, const Matrix* w, const Norm* norm, int32_t activation,
                         int32_t gated, const float* residual) try {
  InputRows rows;
  if (shares_rows(M, *w)) rows.reserve(M, words_per_row(*w));
#pragma omp parallel
  linear(Thread(), y, x, M, *w, *norm, Activation(activation), gated, residual, rows);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

int32_t clearhead_attend_token(float* y, const float* projected, int64_t B, const Heads* heads,
                               const KeyValueView* cache, const RotationAngles* angles,
                               int32_t is_cross_attention) try {
  std::vector<float> states(state_size(*heads, *cache, B));
#pragma omp parallel
  attend_token(Thread(), y, states.data(), projected, B, *heads, *cache, *angles, is_cross_attention);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Compute attention of q (B, T, N H) -> y (B, T, N H).
int32_t clearhead_attend_prompt(float* y, const float* q, int64_t B, int64_t T, const Heads* heads,
                                const KeyValueView* cache, int32_t attends_to_all) try {
  FloatKeysValues floats;
  floats.reserve(B, *heads, *cache);
  const PromptAttention attention{B, T, attends_to_all != 0, *heads, *cache, floats};
#pragma omp parallel
  {
    if (cache->is_bfloat16)
      attention.attend<Bfloat16>(Thread(), y, q, heads->N * heads->H);
    else
      attention.attend<float>(Thread(), y, q, heads->N * heads->H);
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Dequantize W to y (N, K), for the token table and for gradients.
int32_t clearhead_unpack(void* y, const Matrix* w, int32_t as_bfloat16) {
#pragma omp parallel
  {
    const Thread thread;
    for (int64_t n = thread.first(w->N); n < thread.last(w->N); n++) {
      if (as_bfloat16)
        unpack((Bfloat16*)y + n * w->K, *w, n);
      else
        unpack((float*)y + n * w->K, *w, n);
    }
  }
  return 0;
}
}
