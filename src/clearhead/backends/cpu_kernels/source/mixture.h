// A mixture of experts: a router chooses a few experts for each token. The reference in PyTorch is model/mixture.py.
//
//     route      the experts of each token and their weights
//     group      pairs (token, expert), sorted by expert, so that an expert reads its weights once for all of its tokens
//     multiply   the tokens of each expert, in tasks of a few columns, which the threads take one after another
//     combine    the outputs of a token's experts, in the order of their scores, and the shared expert
//
// The bits of a token do not depend on the other tokens: its products and the order of its sums are its own.
// Shapes: M tokens of width D, E experts of width F, C chosen experts for each token, pairs P = M C.
#pragma once
#include <atomic>

#include "linear.h"

struct Mixture {
  int32_t E, C;
  int32_t uses_sigmoid, weighs_input, renormalizes, gated;
  int32_t num_groups, num_kept, sums_top2;  // the choice is limited to the best groups; 0 groups: it is not
  int32_t has_shared, shared_gated, has_shared_gate;
  float softcap, renormalize_epsilon, scale, divisor;
  Matrix router;                   // (E, D), in float32
  const float* selection_bias;     // (E,), added to the scores for the choice only, or null
  const Matrix *gate, *up, *down;  // (E,) of (F, D), (F, D) and (D, F)
  Activation activation, shared_activation;
  Matrix shared_gate_and_up, shared_down, shared_gate;
};

// Memory that the threads share. Tokens are processed MAX_TOKENS at a time, which limits it.
struct MixtureMemory {
  static constexpr int64_t MAX_TOKENS = 512;
  std::vector<float> logits, weights, inner, up, out, shared_inner, shared_out, shared_gate, result;
  std::vector<int32_t> chosen, pairs, places, starts;  // (M, C), (P,), (M, C), (E + 1,)
  std::atomic<int64_t> next_task[2];

  void reserve(int64_t M, const Mixture& mixture) {
    const int64_t D = mixture.router.K, F = mixture.down[0].K, block = std::min(M, MAX_TOKENS), P = block * mixture.C;
    auto grow = [](auto& vector, int64_t size) { vector.resize(std::max<size_t>(vector.size(), size)); };
    grow(logits, block * mixture.E);
    grow(weights, P), grow(chosen, P), grow(pairs, P), grow(places, P);
    grow(starts, mixture.E + 1);
    grow(inner, P * F), grow(up, P * F), grow(out, P * D), grow(result, M * D);
    if (!mixture.has_shared) return;
    grow(shared_inner, block * mixture.shared_down.K), grow(shared_out, block * D), grow(shared_gate, block);
  }
};

// Choose the C experts with the largest scores; of equal ones, the first. Excluded experts have the score -infinity.
inline void choose_experts(int32_t* chosen, const float* scores, int64_t E, int64_t C) {
  for (int64_t c = 0; c < C; c++) {
    int32_t best = -1;
    for (int64_t e = 0; e < E; e++)
      if ((best < 0 || scores[e] > scores[best]) && std::find(chosen, chosen + c, e) == chosen + c) best = int32_t(e);
    chosen[c] = best;
  }
}

// Set the scores of all experts outside of the best groups to -infinity.
inline void keep_best_groups(float* scores, const Mixture& mixture) {
  const int64_t size = mixture.E / mixture.num_groups;
  thread_local std::vector<float> group_scores;
  thread_local std::vector<int32_t> best;
  group_scores.resize(mixture.num_groups), best.resize(mixture.num_kept);
  for (int64_t g = 0; g < mixture.num_groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; e++)
      if (scores[e] > first)
        second = first, first = scores[e];
      else if (scores[e] > second)
        second = scores[e];
    group_scores[g] = mixture.sums_top2 ? first + second : first;
  }
  choose_experts(best.data(), group_scores.data(), mixture.num_groups, mixture.num_kept);
  for (int64_t e = 0; e < mixture.E; e++)
    if (std::find(best.begin(), best.end(), e / size) == best.end()) scores[e] = -INFINITY;
}

// Choose the experts of one token from its logits (E,), which change, and compute their weights. It is never inlined,
// so that all tokens get the same bits.
[[gnu::noinline]] inline void route(int32_t* chosen, float* weights, float* logits, const Mixture& mixture) {
  const int64_t E = mixture.E, C = mixture.C;
  thread_local std::vector<float> scores, ranks;
  scores.resize(E);
  if (mixture.softcap > 0)
    for (int64_t e = 0; e < E; e++)
      logits[e] = mixture.softcap * (1 - 2 / (1 + exponential(2 / mixture.softcap * logits[e])));
  if (mixture.uses_sigmoid) {
    for (int64_t e = 0; e < E; e++) scores[e] = 1 / (1 + exponential(-logits[e]));
  } else {
    const float largest = max_of(logits, E);
    for (int64_t e = 0; e < E; e++) scores[e] = exponential(logits[e] - largest);
    const float sum = sum_of(scores.data(), E, [](float v) { return v; });
    for (int64_t e = 0; e < E; e++) scores[e] /= sum;
  }
  // Sigmoids of large logits tie at 1: unless the choice adds something to the scores, the logits decide.
  const bool adds_to_scores = mixture.selection_bias || mixture.num_groups;
  ranks.assign(adds_to_scores ? scores.data() : logits, (adds_to_scores ? scores.data() : logits) + E);
  for (int64_t e = 0; mixture.selection_bias && e < E; e++) ranks[e] += mixture.selection_bias[e];
  if (mixture.num_groups) keep_best_groups(ranks.data(), mixture);
  choose_experts(chosen, ranks.data(), E, C);
  float sum = 0;
  for (int64_t c = 0; c < C; c++) sum += weights[c] = scores[chosen[c]];
  const float divisor = mixture.renormalizes ? sum + mixture.renormalize_epsilon : 1;
  for (int64_t c = 0; c < C; c++) weights[c] = weights[c] / divisor * mixture.scale;
}

// Sort the pairs of M tokens by expert: those of expert e from starts[e] on. `places` is the inverse of `pairs`.
inline void group_by_expert(MixtureMemory& memory, int64_t M, const Mixture& mixture) {
  std::fill(memory.starts.begin(), memory.starts.begin() + mixture.E + 1, 0);
  const int64_t P = M * mixture.C;
  for (int64_t p = 0; p < P; p++) memory.starts[memory.chosen[p] + 1]++;
  for (int64_t e = 0; e < mixture.E; e++) memory.starts[e + 1] += memory.starts[e];
  std::vector<int32_t> next(memory.starts.begin(), memory.starts.begin() + mixture.E);
  for (int64_t p = 0; p < P; p++) {
    memory.places[p] = next[memory.chosen[p]]++;
    memory.pairs[memory.places[p]] = int32_t(p);
  }
}

// Compute the columns [n, last) of y (M, stride) = W x.
inline void multiply_columns(float* y, int64_t stride, const InputRows& x, int64_t M, const Matrix& w, int64_t n,
                             int64_t last) {
  const Output to{y, w.N, w.bias, IDENTITY, false, nullptr, stride};
  for (; n < last; n += PANEL) {
    const int64_t columns = std::min(PANEL, last - n);
    if (!runs_as_stored(M, w, columns))
      multiply_in_panels(to, x, M, w, n, columns);
    else
      multiply_as_stored(to, x, M, w, n, columns, n + 2 * PANEL <= last ? PanelRows{&w, n + PANEL} : PanelRows{},
                         WHOLE);
  }
}

constexpr int64_t TASK_COLUMNS = 4 * PANEL;

// Call use(e, n, last) for the columns [n, last) of all experts that have tokens; the threads take tasks from a counter.
template <class Use>
void for_columns_of_experts(std::atomic<int64_t>& next_task, const MixtureMemory& memory, int64_t E, int64_t N,
                            Use use) {
  const int64_t per_expert = (N + TASK_COLUMNS - 1) / TASK_COLUMNS;
  int64_t task = next_task++, before = 0;
  for (int64_t e = 0; e < E; e++) {
    if (memory.starts[e] == memory.starts[e + 1]) continue;
    for (; task < before + per_expert; task = next_task++) {
      const int64_t n = (task - before) * TASK_COLUMNS;
      use(e, n, std::min(n + TASK_COLUMNS, N));
    }
    before += per_expert;
  }
}

// Rows of x in the format of W for the tokens of one expert, converted once while a thread stays with that expert.
struct ExpertRows {
  InputRows rows;
  int64_t expert = -1;

  template <class SetRow>
  const InputRows& of(int64_t e, int64_t count, const Matrix& w, SetRow set_row) {
    if (e == expert) return rows;
    rows.reserve(count, words_per_row(w));
    for (int64_t i = 0; i < count; i++) set_row(rows, i);
    expert = e;
    return rows;
  }
};

// Compute the inner values of all pairs: activation(gate x) * up x, or activation(up x).
inline void multiply_inner(MixtureMemory& memory, const float* x, const Mixture& mixture, const Norm& norm) {
  const int64_t D = mixture.router.K, F = mixture.down[0].K;
  thread_local ExpertRows gate_rows, up_rows;
  gate_rows.expert = up_rows.expert = -1;
  for_columns_of_experts(memory.next_task[0], memory, mixture.E, F, [&](int64_t e, int64_t n, int64_t last) {
    const int64_t start = memory.starts[e], count = memory.starts[e + 1] - start;
    auto multiply = [&](float* y, ExpertRows& rows, const Matrix& w) {
      auto set_row = [&](InputRows& to, int64_t i) {
        const int64_t pair = memory.pairs[start + i];
        const float* from = x + pair / mixture.C * D;
        if (!mixture.weighs_input) return to.set_row(i, from, w, norm);
        thread_local std::vector<float> weighted;
        weighted.resize(D);
        normalize(weighted.data(), from, D, norm);
        for (int64_t k = 0; k < D; k++) weighted[k] *= memory.weights[pair];
        to.set_row(i, weighted.data(), w, {NO_NORM, 0, nullptr, nullptr});
      };
      multiply_columns(y + start * F, F, rows.of(e, count, w, set_row), count, w, n, last);
    };
    if (mixture.gated) multiply(memory.inner.data(), gate_rows, mixture.gate[e]);
    multiply(mixture.gated ? memory.up.data() : memory.inner.data(), up_rows, mixture.up[e]);
    for (int64_t p = start; p < start + count; p++) {
      float *inner = &memory.inner[p * F + n], *up = &memory.up[p * F + n];
      if (mixture.gated && mixture.activation.limit > 0) clamp_gate(inner, up, last - n, mixture.activation);
      activate(inner, last - n, mixture.activation);
      for (int64_t i = 0; mixture.gated && i < last - n; i++) inner[i] *= up[i];
    }
  });
}

// Compute the outputs of all pairs from their inner values.
inline void multiply_out(MixtureMemory& memory, const Mixture& mixture) {
  const int64_t D = mixture.router.K, F = mixture.down[0].K;
  thread_local ExpertRows rows;
  rows.expert = -1;
  for_columns_of_experts(memory.next_task[1], memory, mixture.E, D, [&](int64_t e, int64_t n, int64_t last) {
    const int64_t start = memory.starts[e], count = memory.starts[e + 1] - start;
    auto set_row = [&](InputRows& to, int64_t i) {
      to.set_row(i, &memory.inner[(start + i) * F], mixture.down[e], {NO_NORM, 0, nullptr, nullptr});
    };
    const InputRows& x = rows.of(e, count, mixture.down[e], set_row);
    multiply_columns(&memory.out[start * D], D, x, count, mixture.down[e], n, last);
  });
}

// Add up the experts of token m, of which y (D,) is the result. It is never inlined, so that all tokens get the same
// bits.
[[gnu::noinline]] inline void combine_experts(float* y, const MixtureMemory& memory, const Mixture& mixture, int64_t m) {
  const int64_t D = mixture.router.K;
  std::fill(y, y + D, 0.f);
  for (int64_t p = m * mixture.C; p < (m + 1) * mixture.C; p++) {
    const float* out = &memory.out[memory.places[p] * D];
    const float weight = mixture.weighs_input ? 1 : memory.weights[p];
    for (int64_t n = 0; n < D; n++) y[n] += weight * out[n];
  }
  if (mixture.has_shared) {
    const float factor = mixture.has_shared_gate ? 1 / (1 + exponential(-memory.shared_gate[m])) : 1;
    for (int64_t n = 0; n < D; n++) y[n] += factor * memory.shared_out[m * D + n];
  }
  for (int64_t n = 0; mixture.divisor != 1 && n < D; n++) y[n] /= mixture.divisor;
}

// Compute memory.result (M, D) from x (M, D); called by all threads. `rows` holds rows of x in the format of a matrix.
inline void run_mixture(const Thread& thread, const float* x, int64_t M, const Mixture& mixture, const Norm& norm,
                        MixtureMemory& memory, InputRows& rows) {
  const int64_t D = mixture.router.K;
  const Norm none{NO_NORM, 0, nullptr, nullptr};
  for (int64_t start = 0; start < M; start += MixtureMemory::MAX_TOKENS, x += MixtureMemory::MAX_TOKENS * D) {
    const int64_t count = std::min(M - start, MixtureMemory::MAX_TOKENS);
    linear(thread, memory.logits.data(), x, count, mixture.router, norm, IDENTITY, false, nullptr, rows);
    for (int64_t m = thread.first(count); m < thread.last(count); m++)
      route(&memory.chosen[m * mixture.C], &memory.weights[m * mixture.C], &memory.logits[m * mixture.E], mixture);
#pragma omp barrier
    if (thread.number == 0) {
      group_by_expert(memory, count, mixture);
      memory.next_task[0] = memory.next_task[1] = 0;
    }
    if (mixture.has_shared) {
      linear(thread, memory.shared_inner.data(), x, count, mixture.shared_gate_and_up, norm, mixture.shared_activation,
             mixture.shared_gated, nullptr, rows);
      linear(thread, memory.shared_out.data(), memory.shared_inner.data(), count, mixture.shared_down, none, IDENTITY,
             false, nullptr, rows);
      if (mixture.has_shared_gate)
        linear(thread, memory.shared_gate.data(), x, count, mixture.shared_gate, norm, IDENTITY, false, nullptr, rows);
    }
#pragma omp barrier
    multiply_inner(memory, x, mixture, norm);
#pragma omp barrier
    multiply_out(memory, mixture);
#pragma omp barrier
    for (int64_t m = thread.first(count); m < thread.last(count); m++)
      combine_experts(&memory.result[(start + m) * D], memory, mixture, m);
#pragma omp barrier
  }
}
