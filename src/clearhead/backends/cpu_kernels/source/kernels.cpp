// Run new tokens through all layers: the loop of model/block.py with merged linear layers. Every thread runs the whole
// loop and waits at barriers for the others. The functions at the end are called from Python, and structures.py mirrors
// the structures.
//
//     vectors.h     number formats                            panels.h     rows of W, transposed
//     inputs.h      W, norms, rows of x in the format of W    few_rows.h   W as it is stored, for few rows of x
//     tiles.h       products that stay in registers           blocks.h     W in 5 and 6 bits, half groups
//     linear.h      y = W norm(x)
//     activations.h functions of single numbers               heads.h      clip and norms of queries and keys
//     latent.h      latent attention
//     mixture.h     a mixture of experts                      scores.h     softcap, temperature, bias and sinks
//     attention.h   attention of one new token per sequence   prompt.h     of all tokens of a prompt
//     pages.h       of packed tokens of many sequences        packed_batch.h   their layout and pages
//
// Words for pieces of data, from small to large:
//
//     word          32 bits along K: one float, two bfloat16 or four 8-bit integers
//     group         32 quantized values along K that share a scale (and an offset)
//     vector        16 words, one AVX-512 register
//     tile          a few rows of x times a few rows of W, whose sums all stay in registers
//     band, panel   BAND rows of x; PANEL rows of W, transposed, so that a vector holds one word of 16 rows
//     span, state   a range of cache slots; the softmax maximum, sum and output of a span
#include "latent.h"
#include "prompt.h"

// Where a branch f has its norms n and n': x + f(n x), n(x + f x) or x + n'(f(n x)), where n may be the identity; or
// attention and feed-forward read the same x: x + f(n x) + g(n' x).
enum Placement : int32_t { PRE, POST, SANDWICH, PARALLEL };

struct Layer {
  Placement placement;
  int32_t gated, has_cross_attention;
  Heads heads, cross_heads;
  Norm norms[3], branch_norms[3];  // of attention, cross-attention and feed-forward
  Matrix query_key_value, attention_output, cross_query, cross_output, gate_and_up, down;
  Activation activation;
  float branch_scale;  // multiplies what a branch adds to x
  const Mixture* mixture;  // of the feed-forward branch, instead of gate_and_up and down; or null
  const Latent* latent;    // or null; `heads` are then those of the absorbed form, and `query_key_value` projects to
                           // queries, or compressed ones, and latents
};

// Memory that the threads share.
struct Workspace {
  float *x, *projected, *attended, *inner, *branch, *states;
  InputRows& rows;
  FloatKeysValues& floats;
  MixtureMemory& mixture;
  LatentMemory& latent;
};

// Dequantize row n of W. Byte j of an int4 group holds values j and j + 16.
template <class Element>
static void unpack(Element* y, const Matrix& w, int64_t n) {
  if (w.high_bits || w.group_scales) {
    thread_local std::vector<float> values;
    values.resize(w.K);
    unpack_blocks(values.data(), w, n);
    for (int64_t k = 0; k < w.K; k++) write(y[k], values[k]);
    return;
  }
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

// Add the output of a branch, y (M, D), to the residual stream x, with the norms of the layer's placement.
static void add_output(const Thread& thread, const Layer& layer, int branch, float* x, float* y, int64_t M, int64_t D) {
  for (int64_t m = thread.first(M); m < thread.last(M); m++) {
    float *to = x + m * D, *from = y + m * D;
    if (layer.placement == SANDWICH) normalize(from, from, D, layer.branch_norms[branch]);
    for (int64_t n = 0; n < D; n++) to[n] += layer.branch_scale * from[n];
    if (layer.placement == POST) normalize(to, to, D, layer.norms[branch]);
  }
#pragma omp barrier
}

// Add the last product of a branch, W `from`, to the residual stream x.
static void add_branch(const Thread& thread, const Layer& layer, int branch, const Workspace& space, const float* from,
                       const Matrix& w, int64_t M, const Following& following) {
  const bool adds_product = layer.placement == PRE || layer.placement == PARALLEL;
  if (adds_product && layer.branch_scale == 1)
    return linear(thread, space.x, from, M, w, UNNORMALIZED, IDENTITY, false, space.x, space.rows, following);
  linear(thread, space.branch, from, M, w, UNNORMALIZED, IDENTITY, false, nullptr, space.rows, following);
  add_output(thread, layer, branch, space.x, space.branch, M, w.N);
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

// Run M tokens in space.x through one layer; called by all threads. self_attention and cross_attention compute
// space.attended from space.projected. `next_layer` is null after the last layer.
template <class SelfAttention, class CrossAttention>
static void run_layer(const Thread& thread, const Layer& layer, const Layer* next_layer, const Workspace& space,
                      int64_t M, SelfAttention self_attention, CrossAttention cross_attention) {
  auto norm_before = [&](int branch) -> const Norm& {
    return layer.placement == POST ? UNNORMALIZED : layer.norms[branch];
  };
  const bool is_parallel = layer.placement == PARALLEL;
  const Following output{&layer.attention_output}, next{next_layer ? &next_layer->query_key_value : nullptr};
  const Following inner = layer.mixture ? Following{} : Following{&layer.gate_and_up, layer.gated != 0};
  auto feed_forward = [&] {
    if (layer.mixture)
      return run_mixture(thread, space.x, M, *layer.mixture, norm_before(2), space.mixture, space.rows);
    linear(thread, space.inner, space.x, M, layer.gate_and_up, norm_before(2), layer.activation, layer.gated, nullptr,
           space.rows, is_parallel ? output : Following{&layer.down});
  };
  linear(thread, space.projected, space.x, M, layer.query_key_value, norm_before(0), IDENTITY, false, nullptr,
         space.rows, is_parallel ? inner : output);
  if (is_parallel) feed_forward();  // before attention changes x
  prepare_heads(thread, space.projected, M, layer.heads, layer.heads.N + 2 * layer.heads.K);
  self_attention();
  add_branch(thread, layer, 0, space, space.attended, layer.attention_output, M,
             layer.has_cross_attention ? Following{&layer.cross_query}
             : is_parallel             ? Following{&layer.down}
                                       : inner);
  if (layer.has_cross_attention) {
    linear(thread, space.projected, space.x, M, layer.cross_query, norm_before(1), IDENTITY, false, nullptr,
           space.rows, Following{&layer.cross_output});
    prepare_heads(thread, space.projected, M, layer.cross_heads, layer.cross_heads.N);
    cross_attention();
    add_branch(thread, layer, 1, space, space.attended, layer.cross_output, M, inner);
  }
  if (!is_parallel) feed_forward();
  if (layer.mixture)
    add_output(thread, layer, 2, space.x, space.mixture.result.data(), M, layer.mixture->router.K);
  else
    add_branch(thread, layer, 2, space, space.inner, layer.down, M, next);
}

// Memory for M rows in all layers. It is kept for the next call if it is small, as for single tokens.
struct WorkspaceMemory {
  std::vector<float> floats;
  InputRows rows;
  FloatKeysValues keys_values;
  MixtureMemory mixture;
  LatentMemory latent;

  // Allocate it, with room for `states` more floats, and return where its parts are.
  Workspace reserve(float* x, int64_t M, const Layer* layers, int64_t num_layers, int64_t states) {
    int64_t projected = 0, attended = 0, inner = 0, longest = 0;
    for (const Layer* layer = layers; layer < layers + num_layers; layer++) {
      const bool cross = layer->has_cross_attention;
      projected = std::max({projected, layer->query_key_value.N, cross ? layer->cross_query.N : 0});
      attended = std::max({attended, layer->attention_output.K, cross ? layer->cross_output.K : 0});
      inner = std::max(inner, layer->down.K);
      for (const Matrix* w : {&layer->query_key_value, &layer->attention_output, &layer->gate_and_up, &layer->down,
                              &layer->cross_query, &layer->cross_output})
        if (M > MAX_PRIVATE_ROWS) longest = std::max(longest, words_per_row(*w));
      if (layer->latent && M > MAX_PRIVATE_ROWS) longest = std::max(longest, words_per_row(layer->latent->query_up));
      if (!layer->mixture) continue;
      mixture.reserve(M, *layer->mixture);
      for (const Matrix* w : {&layer->mixture->router, &layer->mixture->shared_gate_and_up,
                              &layer->mixture->shared_down, &layer->mixture->shared_gate})
        if (M > MAX_PRIVATE_ROWS) longest = std::max(longest, words_per_row(*w));
    }
    const int64_t D = layers[0].query_key_value.K;
    rows.reserve(M, longest);
    rows.reserve_transposed(M, longest);
    floats.resize(std::max<size_t>(floats.size(), M * (projected + attended + inner + D) + states));
    Workspace space{x, floats.data(), nullptr, nullptr, nullptr, nullptr, rows, keys_values, mixture, latent};
    space.attended = space.projected + M * projected;
    space.inner = space.attended + M * attended;
    space.branch = space.inner + M * inner;
    space.states = space.branch + M * D;
    return space;
  }

  static constexpr int64_t MAX_KEPT_ROWS = 64;
};

extern "C" {

// The number of rows of x up to which products with a plain W are faster here than in PyTorch, and whether prompts are
// faster too, which needs AVX-512.
#ifdef CLEARHEAD_AVX512
int32_t clearhead_max_plain_rows() { return INT32_MAX; }
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
  static thread_local WorkspaceMemory small;
  WorkspaceMemory large, &memory = B * T > WorkspaceMemory::MAX_KEPT_ROWS || T > 1 ? large : small;
  const int64_t D = layers[0].query_key_value.K, M = B * T;
  int64_t states = 0;
  for (int64_t i = 0; i < num_layers; i++) {
    states = std::max(states, state_size(layers[i].heads, caches[i], B));
    if (layers[i].has_cross_attention) states = std::max(states, state_size(layers[i].cross_heads, cross_caches[i], B));
    if (T > 1) memory.keys_values.reserve(B, layers[i].heads, caches[i]);
  }
  const Workspace space = memory.reserve(x, M, layers, num_layers, states);
#pragma omp parallel
  {
    const Thread thread;
    for (int64_t i = 0; i < num_layers; i++) {
      const Layer &layer = layers[i], *next_layer = i + 1 < num_layers ? &layers[i + 1] : nullptr;
      auto self_attention = [&] {
        const PromptAttention prompt{B, T, false, layer.heads, caches[i], space.floats};
        if (T == 1)
          attend_token(thread, space.attended, space.states, space.projected, B, layer.heads, caches[i], angles[i],
                       false);
        else if (caches[i].is_bfloat16)
          attend_prompt<Bfloat16>(thread, prompt, space, angles[i]);
        else
          attend_prompt<float>(thread, prompt, space, angles[i]);
      };
      run_layer(thread, layer, next_layer, space, M, self_attention, [&] {
        attend_token(thread, space.attended, space.states, space.projected, B, layer.cross_heads, cross_caches[i],
                     angles[i], true);
      });
    }
    for (int64_t m = thread.first(M); m < thread.last(M); m++) normalize(x + m * D, x + m * D, D, *final_norm);
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

// Run packed tokens x (T, D) of many sequences through all layers, in place. pages has one entry per layer; so have
// source_pages, the keys and values of cross-attention. These and `sources` are null for a decoder without an encoder.
int32_t clearhead_run_packed(const Layer* layers, int64_t num_layers, const PageView* pages, const PackedBatch* batch,
                             const PageView* source_pages, const PackedBatch* sources, const Norm* final_norm,
                             float* x) try {
  static thread_local WorkspaceMemory small;
  const int64_t D = layers[0].query_key_value.K, M = batch->num_tokens;
  WorkspaceMemory large, &memory = M > WorkspaceMemory::MAX_KEPT_ROWS ? large : small;
  const AttentionSchedule schedule(*batch), source_schedule(sources ? *sources : *batch);
  int64_t states = 0;
  for (int64_t i = 0; i < num_layers; i++) {
    states = std::max(states, schedule.state_size(layers[i].heads));
    if (sources) states = std::max(states, source_schedule.state_size(layers[i].cross_heads));
    if (layers[i].latent) memory.latent.reserve(*batch, *layers[i].latent, pages[i].is_bfloat16);
  }
  const Workspace space = memory.reserve(x, M, layers, num_layers, states);
#pragma omp parallel
  {
    const Thread thread;
    for (int64_t i = 0; i < num_layers; i++)
      run_layer(
          thread, layers[i], i + 1 < num_layers ? &layers[i + 1] : nullptr, space, M,
          [&] {
            if (layers[i].latent)
              return (pages[i].is_bfloat16 ? attend_latent<Bfloat16> : attend_latent<float>)(
                  thread, space.attended, space.states, space.projected, layers[i].query_key_value.N, *batch, schedule,
                  pages[i], layers[i].heads, *layers[i].latent, space.latent, space.rows);
            (pages[i].is_bfloat16 ? attend_packed<Bfloat16> : attend_packed<float>)(
                thread, space.attended, space.states, space.projected, *batch, schedule, pages[i], layers[i].heads);
          },
          [&] {
            (source_pages[i].is_bfloat16 ? attend_sources<Bfloat16> : attend_sources<float>)(
                thread, space.attended, space.states, space.projected, *sources, source_schedule, source_pages[i],
                layers[i].cross_heads);
          });
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
  if (M > MAX_PRIVATE_ROWS) rows.reserve(M, words_per_row(*w)), rows.reserve_transposed(M, words_per_row(*w));
#pragma omp parallel
  linear(Thread(), y, x, M, *w, *norm, ActivationKind(activation), gated, residual, rows);
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
