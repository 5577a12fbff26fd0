// Latent attention in its absorbed form, over packed tokens. The reference in PyTorch is attend_absorbed in
// model/latent_attention.py.
//
//     store      the normalized latent c and the rotated key r of each new token, in the pages
//     absorb     the query of head n: [to_key_n p | rotated], as wide as [c | r]
//     gather     [c | r] of all tokens of a sequence, side by side: keys of one head, whose first R entries are values
//     attend     as multi-query attention with heads of width R + 2 rotary_pairs (pages.h)
//     unfold     to_value_n on the first R entries of the result
//
// Shapes: M tokens, N heads, R latent rank, P plain width, V value width, H = R + 2 rotary_pairs.
#pragma once
#include "mixture.h"
#include "pages.h"

struct Latent {
  int32_t N, R, P, V, rotary_pairs, interleaved;
  int32_t has_query_up;
  Norm query_norm, latent_norm;
  Matrix query_up;                   // (N (P + 2 rotary_pairs), query rank)
  const Matrix *to_key, *to_value;  // (N,) of (R, P) and of (V, R)

  int64_t rotary_width() const { return 2 * rotary_pairs; }
  int64_t H() const { return R + rotary_width(); }
  int64_t head_width() const { return P + rotary_width(); }
  // Return the entries of a projected row before the latent.
  int64_t query_width() const { return has_query_up ? query_up.K : N * head_width(); }
};

// Memory that the threads share.
struct LatentMemory {
  std::vector<float> compressed, raw, queries, attended;  // (M, query rank), (M, N (P + rotary)), (M, (N + 2) H), (M, N H)
  std::vector<uint16_t> keys;                             // (slots, H) of the format of the cache
  std::vector<int32_t> tables;                            // pages of SPAN slots, of each sequence
  std::vector<int64_t> first_slots;                       // of each sequence in `keys`
  int64_t table_stride = 0;

  void reserve(const PackedBatch& batch, const Latent& latent, bool is_bfloat16) {
    const int64_t M = batch.num_tokens, B = batch.num_sequences, H = latent.H();
    auto grow = [](auto& vector, int64_t size) { vector.resize(std::max<size_t>(vector.size(), size)); };
    first_slots.assign(B + 1, 0);
    table_stride = 0;
    for (int64_t b = 0; b < B; b++) {
      const int64_t pages = (batch.lengths[b] + SPAN - 1) / SPAN;
      first_slots[b + 1] = first_slots[b] + pages * SPAN;
      table_stride = std::max(table_stride, pages);
    }
    tables.assign(B * table_stride, 0);
    for (int64_t b = 0; b < B; b++)
      for (int64_t i = 0; i < (first_slots[b + 1] - first_slots[b]) / SPAN; i++)
        tables[b * table_stride + i] = int32_t(first_slots[b] / SPAN + i);
    grow(compressed, M * (latent.has_query_up ? latent.query_up.K : 0));
    grow(raw, M * (latent.has_query_up ? latent.query_up.N : 0));
    grow(queries, M * (latent.N + 2) * H), grow(attended, M * latent.N * H);
    grow(keys, first_slots[B] * H * (is_bfloat16 ? 1 : 2));
  }
};

template <class Element>
struct LatentStep {
  const PackedBatch& batch;
  const PageView& pages;  // latents are its keys, rotary keys its values
  const Latent& latent;
  LatentMemory& memory;

  Heads rotary_heads() const {
    Heads heads{};
    heads.H = int32_t(latent.rotary_width());
    heads.rotary_pairs = latent.rotary_pairs;
    heads.interleaved = latent.interleaved;
    return heads;
  }

  void rotate(float* y, const float* x, int64_t m) const {
    const Norm none{NO_NORM, 0, nullptr, nullptr};
    norm_and_rotate(y, x, rotary_heads(), none, {pages.cosine, pages.sine, 0}, 0, batch.positions[m]);
  }

  // Store the latents and rotary keys of this thread's rows of `projected` (M, width), and copy compressed queries.
  [[gnu::noinline]] void store(const Thread& thread, const float* projected, int64_t width) const {
    const int64_t R = latent.R, W = latent.rotary_width(), Q = latent.query_width();
    std::vector<float> token(latent.H());
    for (int64_t m = thread.first(batch.num_tokens); m < thread.last(batch.num_tokens); m++) {
      const float* row = projected + m * width;
      if (latent.has_query_up) std::copy(row, row + Q, &memory.compressed[m * Q]);
      normalize(token.data(), row + Q, R, latent.latent_norm);
      rotate(&token[R], row + Q + R, m);
      Element *key = (Element*)pages.keys + batch.slots[m] * R, *value = (Element*)pages.values + batch.slots[m] * W;
      for (int64_t i = 0; i < R; i++) write(key[i], token[i]);
      for (int64_t i = 0; i < W; i++) write(value[i], token[R + i]);
    }
  }

  // Compute the columns of y = W x of this thread's heads: W[n] for the `count` entries of each row from x + n step on.
  void multiply_heads(const Thread& thread, float* y, int64_t y_stride, int64_t y_step, const float* x,
                      int64_t x_stride, int64_t x_step, const Matrix* w) const {
    thread_local InputRows rows;
    const int64_t M = batch.num_tokens;
    for (int64_t n = thread.first(latent.N); n < thread.last(latent.N); n++) {
      rows.reserve(M, words_per_row(w[n]));
      for (int64_t m = 0; m < M; m++)
        rows.set_row(m, x + m * x_stride + n * x_step, w[n], {NO_NORM, 0, nullptr, nullptr});
      multiply_columns(y + n * y_step, y_stride, rows, M, w[n], 0, w[n].N);
    }
  }

  // Copy the latents and rotary keys of all sequences, a part by each thread.
  void gather(const Thread& thread) const {
    const int64_t R = latent.R, W = latent.rotary_width(), H = latent.H(), size = batch.page_size;
    const int64_t total = memory.first_slots[batch.num_sequences];
    int64_t b = 0;
    for (int64_t slot = thread.first(total); slot < thread.last(total); slot++) {
      while (slot >= memory.first_slots[b + 1]) b++;
      const int64_t s = slot - memory.first_slots[b];
      if (s >= batch.lengths[b]) continue;
      const int64_t place = int64_t(batch.tables[b * batch.table_stride + s / size]) * size + s % size;
      Element* to = (Element*)memory.keys.data() + slot * H;
      std::memcpy(to, (const Element*)pages.keys + place * R, R * sizeof(Element));
      std::memcpy(to + R, (const Element*)pages.values + place * W, W * sizeof(Element));
    }
  }
};

// Store the new latents and compute y (M, N V) from projected (M, width); called by all threads. `heads` are those of
// the absorbed form.
template <class Element>
void attend_latent(const Thread& thread, float* y, float* states, const float* projected, int64_t width,
                   const PackedBatch& batch, const AttentionSchedule& schedule, const PageView& pages,
                   const Heads& heads, const Latent& latent, LatentMemory& memory, InputRows& rows) {
  const LatentStep<Element> step{batch, pages, latent, memory};
  const int64_t M = batch.num_tokens, N = latent.N, R = latent.R, H = latent.H();
  step.store(thread, projected, width);
#pragma omp barrier
  const float* raw = projected;
  int64_t raw_stride = width;
  if (latent.has_query_up) {
    linear(thread, memory.raw.data(), memory.compressed.data(), M, latent.query_up, latent.query_norm, IDENTITY, false,
           nullptr, rows);
    raw = memory.raw.data(), raw_stride = latent.query_up.N;
  }
  float* queries = memory.queries.data();
  step.multiply_heads(thread, queries, (N + 2) * H, H, raw, raw_stride, latent.head_width(), latent.to_key);
  for (int64_t n = thread.first(N); n < thread.last(N); n++)
    for (int64_t m = 0; m < M; m++)
      step.rotate(queries + (m * (N + 2) + n) * H + R, raw + m * raw_stride + n * latent.head_width() + latent.P, m);
  step.gather(thread);
#pragma omp barrier
  const PackedBatch gathered{batch.num_sequences, M,             SPAN,          memory.table_stride,
                             batch.positions,     batch.slots,   batch.starts,  batch.lengths,
                             memory.tables.data()};
  PageView keys{};
  keys.keys = keys.values = memory.keys.data();
  attend_stored<Element>(thread, memory.attended.data(), states, queries, (N + 2) * H, gathered, schedule, keys, heads);
  step.multiply_heads(thread, y, N * latent.V, latent.V, memory.attended.data(), N * H, H, latent.to_value);
#pragma omp barrier
}
