// Attention of packed tokens: new tokens of many sequences in one row, each sequence with its own length and pages
// (cache/packed_cache.py). The reference in PyTorch is model/attention.py.
//
// The slots of a sequence are divided into spans of fixed length, counted from its first token. A query has a state for
// each span (the largest score, the sum of the weights, the weighted values), and the states are joined in order. Slots
// that a query must not attend to have the weight 0. The bits of a token's output therefore do not depend on the other
// tokens of the call, on how its prompt was cut into pieces, or on the number of threads.
//
// Shapes as in attention.h: N heads, K key-value heads, H head width. A band is up to BAND_TOKENS new tokens of one
// sequence, which share the reading of a page; its rows are the queries of one key-value head.
#pragma once
#include "packed_batch.h"

// Store the rotated keys and the values of this thread's tokens, and rotate their queries in place.
template <class Element>
[[gnu::noinline]] void store_tokens(const Thread& thread, float* projected, const PackedBatch& batch,
                                    const PageView& pages, const Heads& heads) {
  const int64_t H = heads.H, width = (heads.N + 2 * heads.K) * H, size = batch.page_size;
  const RotationAngles angles{pages.cosine, pages.sine, 0};
  for (int64_t m = thread.first(batch.num_tokens); m < thread.last(batch.num_tokens); m++) {
    float* row = projected + m * width;
    for (int64_t n = 0; n < heads.N + heads.K; n++)
      norm_and_rotate(row + n * H, row + n * H, heads, n < heads.N ? heads.query_norm : heads.key_norm, angles, 0,
                      batch.positions[m]);
    for (int64_t k = 0; k < heads.K; k++) {
      const int64_t place = ((batch.slots[m] / size * heads.K + k) * size + batch.slots[m] % size) * H;
      const float *key = row + (heads.N + k) * H, *value = key + heads.K * H;
      for (int64_t h = 0; h < H; h++) write(((Element*)pages.keys)[place + h], key[h]);
      for (int64_t h = 0; h < H; h++) write(((Element*)pages.values)[place + h], value[h]);
    }
  }
}

// The three steps from the scores (SPAN,) of one query to its weights. Each needs the result of the one before, so all
// rows of a band take one step before the next: the processor then works on several rows at once. They are never inlined,
// so that all rows get the same bits.

// Write MASKED outside of [first, last), and return the largest score.
[[gnu::noinline]] inline float mask_scores(float* row, int32_t first, int32_t last) {
  for (int32_t i = 0; i < first; i++) row[i] = MASKED;
  for (int32_t i = last; i < SPAN; i++) row[i] = MASKED;
  Vector tops = load(row);
  for (int64_t i = 16; i < SPAN; i += 16) tops = tops < load(row + i) ? load(row + i) : tops;
  return largest_lane(tops);
}

// Write e^(score - largest), and 0 outside of [first, last). Indices have 32 bits, so that as many of them as scores fit
// into a vector.
[[gnu::noinline]] inline void exponentiate_scores(float* row, int32_t first, int32_t last, float largest) {
  for (int32_t i = 0; i < SPAN; i++) row[i] = i >= first && i < last ? exponential(row[i] - largest) : 0;
}

[[gnu::noinline]] inline float sum_of_weights(const float* row) {
  Vector sums = {};
  for (int64_t i = 0; i < SPAN; i += 16) sums += load(row + i);
  return sum_of_lanes(sums);
}

// Join the state of the next span to that of the earlier ones, both (H + 2,): largest score, sum, weighted values.
[[gnu::noinline]] inline void join_state(float* state, const float* next, int64_t H) {
  const float largest = std::max(state[0], next[0]);
  const float keep = state[0] == MASKED ? 0 : exponential(state[0] - largest);
  const float add = next[0] == MASKED ? 0 : exponential(next[0] - largest);
  for (int64_t h = 1; h < H + 2; h++) state[h] = state[h] * keep + next[h] * add;
  state[0] = largest;
}

// Attention of one layer.
template <class Element>
struct PagedAttention {
  const PackedBatch& batch;
  const PageView& pages;
  const Heads& heads;
  const float* projected;  // (T, width), with the rotated queries first
  const int64_t width;

  const int64_t H = heads.H, group = heads.N / heads.K;

  // Memory of one thread.
  struct Scratch {
    AlignedVector<float> queries, keys, values, scores;
  };

  // Return the keys or values of slot s of a sequence, which are adjacent to those of the rest of its block.
  const Element* block(const void* from, int64_t sequence, int64_t k, int64_t s) const {
    const int64_t page = batch.tables[sequence * batch.table_stride + s / batch.page_size];
    return (const Element*)from + ((page * heads.K + k) * batch.page_size + s % batch.page_size) * H;
  }

  void prefetch(const void* from, int64_t sequence, int64_t k, int64_t first, int64_t last) const {
    for (int64_t s = first; s < last; s += BLOCK) {
      const char* start = (const char*)block(from, sequence, k, s);
      for (int64_t byte = 0; byte < std::min(BLOCK, last - s) * H * int64_t(sizeof(Element)); byte += 64)
        __builtin_prefetch(start + byte, 0, 2);
    }
  }

  // Return the first block of a span that the band attends to. Earlier ones may be in pages that were given back.
  int64_t first_block(const Band& band, int64_t first) const {
    return std::max<int64_t>(0, pages.first_slot(batch.positions[band.token]) - first) / BLOCK * BLOCK;
  }

  // Write the keys of the slots from `begin` to `count` of a span as a panel (H, SPAN) of floats.
  void transpose_keys(float* panel, int64_t sequence, int64_t k, int64_t first, int64_t begin, int64_t count) const {
    for (int64_t s = begin; s < count; s += BLOCK) {
      const Element* keys = block(pages.keys, sequence, k, first + s);
      const int64_t rows = std::min(BLOCK, count - s), per_word = 4 / sizeof(Element), words = H / per_word;
      for (int64_t i = 0; i < words; i += 16)
        for_columns((const char*)keys + i * 4, H * sizeof(Element), rows, words - i, [&](int64_t c, Words column) {
          float* to = panel + (i + c) * per_word * SPAN + s;
          *(Vector*)to = (Vector)(per_word == 2 ? column << 16 : column);
          if (per_word == 2) *(Vector*)(to + SPAN) = (Vector)(column & 0xffff0000u);
        });
      for (int64_t h = words * per_word; h < H; h++)
        for (int64_t r = 0; r < BLOCK; r++) panel[h * SPAN + s + r] = r < rows ? read(keys[r * H + h]) : 0;
    }
  }

  // Scores are added in one order, whether a token is alone or in a band: 16 sums of every sixteenth product, which are
  // then added in the order of sum_vectors. A single token reads the keys as they are stored, since turning them into a
  // panel takes longer than to multiply them once.
  static constexpr int SCORE_ROWS = 4, PANEL_ROWS = 3;  // 2 and 4 rows of a panel are slower

  // Compute the scores of up to a block of keys for `rows` queries, four keys at a time.
  template <int rows>
  void score_slots(float* scores, const float* queries, const Element* keys, int64_t count) const {
    for (int64_t s = 0; s < count; s += 4, scores += 4) {
      const Element* key[4];  // those after the last one are not used
      for (int64_t i = 0; i < 4; i++) key[i] = keys + std::min(s + i, count - 1) * H;
      Vector sums[rows][4] = {};
      for (int64_t h = 0; h + 16 <= H; h += 16) {
        CLEARHEAD_UNROLL
        for (int i = 0; i < 4; i++) {
          const Vector part = load(key[i] + h);
          CLEARHEAD_UNROLL
          for (int r = 0; r < rows; r++) sums[r][i] = fused_add(sums[r][i], part, load(queries + r * H + h));
        }
      }
      for (int r = 0; r < rows; r++) {
        sum_vectors(scores + r * SPAN, sums[r]);
        for (int64_t h = H / 16 * 16; h < H; h++)
          for (int i = 0; i < 4; i++)
            scores[r * SPAN + i] = std::fma(read(key[i][h]), queries[r * H + h], scores[r * SPAN + i]);
      }
    }
  }

  // Compute the scores of PANEL keys, which are columns of a panel (H, SPAN), for `rows` queries. `width` is H as a
  // constant, or 0. The sums are a tree, computed depth first, so that few of its nodes are in registers at a time.
  template <int rows, int width>
  void score_panel(float* scores, const float* queries, const float* panel) const {
    using Sums = Vector[rows][2];
    const int64_t H = width ? width : this->H, whole = H / 16 * 16;
    auto add = [&](Sums& sums, const Sums& others) {
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++) {
        sums[r][0] = ordered_add(sums[r][0], others[r][0]);
        sums[r][1] = ordered_add(sums[r][1], others[r][1]);
      }
    };
    auto add_product = [&](Sums& sums, int64_t h) {
      Vector left = load(panel + h * SPAN), right = load(panel + h * SPAN + 16);
      keep_in_register(left);
      keep_in_register(right);
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++) {
        const Vector one = broadcast(queries[r * H + h]);
        sums[r][0] = fused_add(sums[r][0], left, one);
        sums[r][1] = fused_add(sums[r][1], right, one);
      }
    };
    auto sum_lane = [&](Sums& sums, int64_t lane) {  // every sixteenth product
      CLEARHEAD_UNROLL
      for (int64_t h = lane; h < whole; h += 16) add_product(sums, h);
    };
    auto sum_two = [&](Sums& sums, int64_t lane) {
      Sums other = {};
      sum_lane(sums, lane);
      sum_lane(other, lane + 2);
      add(sums, other);
    };
    auto sum_four = [&](Sums& sums, int64_t lane) {
      Sums odd = {};
      sum_two(sums, lane);
      sum_two(odd, lane + 1);
      add(sums, odd);
    };
    auto sum_eight = [&](Sums& sums, int64_t lane) {
      Sums other = {};
      sum_four(sums, lane);
      sum_four(other, lane + 8);
      add(sums, other);
    };
    Sums sums = {}, others = {};
    sum_eight(sums, 0);
    sum_eight(others, 4);
    add(sums, others);
    for (int64_t h = whole; h < H; h++) add_product(sums, h);
    store_sums(scores, SPAN, sums);
  }

  // Call use with H as a constant if it is a common head width, else with 0.
  template <class Use>
  void for_width(Use use) const {
    if (H == 64) return use(std::integral_constant<int, 64>());
    if (H == 128) return use(std::integral_constant<int, 128>());
    use(std::integral_constant<int, 0>());
  }

  // Compute states (rows, H + 2) of all rows of a band for the slots [first, first + SPAN).
  void attend_span(float* states, Scratch& scratch, const Band& band, int64_t k, int64_t first) const {
    const int64_t rows = band.count * group, last = batch.positions[band.token + band.count - 1] + 1;
    const int64_t count = std::min(SPAN, last - first), begin = first_block(band, first);
    float* scores = scratch.scores.data();
    if (band.count == 1) {
      for (int64_t s = begin; s < count; s += BLOCK) {
        const int64_t end = std::min(s + BLOCK, count);
        prefetch(pages.values, band.sequence, k, first + s, first + end);
        const Element* keys = block(pages.keys, band.sequence, k, first + s);
        for (int64_t r = 0; r < rows; r += SCORE_ROWS)
          in_tiles<SCORE_ROWS>(rows - r, [&](auto tile) {
            score_slots<tile.value>(scores + r * SPAN + s, &scratch.queries[r * H], keys, end - s);
          });
      }
    } else {
      prefetch(pages.values, band.sequence, k, first + begin, first + count);
      transpose_keys(scratch.keys.data(), band.sequence, k, first, begin, count);
      prefetch(pages.keys, band.sequence, k, first + SPAN, std::min(first + 2 * SPAN, last));
      for_width([&](auto width) {
        for (int64_t r = 0; r < rows; r += PANEL_ROWS)
          for (int64_t s = begin / PANEL * PANEL; s < count; s += PANEL)
            in_tiles<PANEL_ROWS>(rows - r, [&](auto tile) {
              score_panel<tile.value, width.value>(scores + r * SPAN + s, &scratch.queries[r * H],
                                                   scratch.keys.data() + s);
            });
      });
    }
    weigh_scores(states, scores, band, k, first);
    add_values(states, scratch, band, k, first, begin, count);
  }

  // Call use(r, n, position, begin, end) for each row of a band: query head n attends to slots [begin, end) of a span.
  template <class Use>
  void for_rows(const Band& band, int64_t k, int64_t first, Use use) const {
    for (int64_t t = 0; t < band.count; t++) {
      const int64_t position = batch.positions[band.token + t];
      const int32_t begin = int32_t(std::clamp<int64_t>(pages.first_slot(position) - first, 0, SPAN));
      const int32_t end = int32_t(std::clamp<int64_t>(position + 1 - first, 0, SPAN));
      for (int64_t g = 0; g < group; g++) use(t * group + g, k * group + g, position, begin, end);
    }
  }

  // Turn the scores (rows, SPAN) of a band into weights; write their sums and the largest scores to the states.
  void weigh_scores(float* states, float* scores, const Band& band, int64_t k, int64_t first) const {
    const int64_t stride = H + 2;
    for_rows(band, k, first, [&](int64_t r, int64_t n, int64_t position, int32_t begin, int32_t end) {
      const ScoreTerms terms = pages.terms(n, position, first + begin);
      if (adjusts_scores(heads, terms)) adjust_scores(scores + r * SPAN + begin, end - begin, heads, terms);
      states[r * stride] = mask_scores(scores + r * SPAN, begin, end);
    });
    for_rows(band, k, first, [&](int64_t r, int64_t, int64_t, int32_t begin, int32_t end) {
      exponentiate_scores(scores + r * SPAN, begin, end, states[r * stride]);
    });
    for (int64_t r = 0; r < band.count * group; r++) states[r * stride + 1] = sum_of_weights(scores + r * SPAN);
  }

  // Multiply the weights with the values, PANEL columns at a time.
  void add_values(float* states, Scratch& scratch, const Band& band, int64_t k, int64_t first, int64_t begin,
                  int64_t count) const {
    const Element* blocks[SPAN / BLOCK] = {};
    const float* copies[SPAN / BLOCK];
    for (int64_t s = begin; s < count; s += BLOCK) blocks[s / BLOCK] = block(pages.values, band.sequence, k, first + s);
    for (int64_t i = 0; i < SPAN / BLOCK; i++) copies[i] = &scratch.values[i * BLOCK * PANEL];
    const int64_t rows = band.count * group, stride = H + 2;
    for (int64_t h = 0; h < H; h += PANEL) {
      const int64_t columns = std::min(PANEL, H - h);
      const bool copied = rows > BAND || columns < PANEL;  // each tile would convert the values again
      if (copied) copy_values(scratch.values.data(), blocks, h, columns, begin, count);
      for (int64_t r = 0; r < rows; r += BAND)
        in_tiles<BAND>(rows - r, [&](auto tile) {
          const float* weights = &scratch.scores[r * SPAN];
          float *to = states + r * stride + 2 + h, out[tile.value * PANEL];
          if (columns < PANEL) {
            multiply_values<tile.value>(out, PANEL, weights, copies, 0, PANEL, begin, count);
            for (int64_t i = 0; i < tile.value; i++) std::copy_n(out + i * PANEL, columns, to + i * stride);
          } else if (copied) {
            multiply_values<tile.value>(to, stride, weights, copies, 0, PANEL, begin, count);
          } else {
            multiply_values<tile.value>(to, stride, weights, blocks, h, H, begin, count);
          }
        });
    }
  }

  // Compute PANEL columns of the outputs of `rows` rows: the sums of the weights times the values, slot by slot.
  template <int rows, class Value>
  void multiply_values(float* out, int64_t out_stride, const float* weights,
                       const Value* const (&blocks)[SPAN / BLOCK], int64_t h, int64_t slot_stride, int64_t begin,
                       int64_t count) const {
    Vector sums[rows][2] = {};
    for (int64_t s = begin; s < count; s += BLOCK) {
      const Value* values = blocks[s / BLOCK] + h;
      for (int64_t i = 0; i < std::min(BLOCK, count - s); i++) {
        const Vector left = load(values + i * slot_stride), right = load(values + i * slot_stride + 16);
        CLEARHEAD_UNROLL
        for (int r = 0; r < rows; r++) {
          const Vector weight = broadcast(weights[r * SPAN + s + i]);
          sums[r][0] = fused_add(sums[r][0], left, weight);
          sums[r][1] = fused_add(sums[r][1], right, weight);
        }
      }
    }
    store_sums(out, out_stride, sums);
  }

  // Convert columns [h, h + columns) of the values to floats (SPAN, PANEL).
  void copy_values(float* to, const Element* const (&blocks)[SPAN / BLOCK], int64_t h, int64_t columns, int64_t begin,
                   int64_t count) const {
    for (int64_t s = begin; s < count; s++) {
      const Element* from = blocks[s / BLOCK] + s % BLOCK * H + h;
      float* row = to + s * PANEL;
      if (columns == PANEL)
        for (int64_t i = 0; i < PANEL; i += 16) *(Vector*)(row + i) = load(from + i);
      else
        for (int64_t i = 0; i < PANEL; i++) row[i] = i < columns ? read(from[i]) : 0;
    }
  }

  // Call use with min(count, rows) as a constant.
  template <int rows, class Use>
  static void in_tiles(int64_t count, Use use) {
    if constexpr (rows > 1)
      if (count < rows) return in_tiles<rows - 1>(count, use);
    use(std::integral_constant<int, rows>());
  }

  // Copy the queries of a band for key-value head k, scaled.
  void gather_queries(Scratch& scratch, const Band& band, int64_t k) const {
    const int64_t rows = band.count * group;
    scratch.queries.resize(std::max<size_t>(scratch.queries.size(), rows * H));
    scratch.keys.resize(std::max<size_t>(scratch.keys.size(), H * SPAN));
    scratch.values.resize(SPAN * PANEL);
    scratch.scores.resize(std::max<size_t>(scratch.scores.size(), rows * SPAN));
    for (int64_t r = 0; r < rows; r++) {
      const float* query = projected + (band.token + r / group) * width + (k * group + r % group) * H;
      for (int64_t h = 0; h < H; h++) scratch.queries[r * H + h] = query[h] * heads.scale;
    }
  }

  // The spans that a band attends to.
  int64_t first_span(const Band& band) const { return pages.first_slot(batch.positions[band.token]) / SPAN; }
  int64_t last_span(const Band& band) const { return batch.positions[band.token + band.count - 1] / SPAN; }

  // Write the output of row r of a band, y (T, N H), from its state.
  void write_output(float* y, const Band& band, int64_t k, int64_t r, const float* state) const {
    float* to = y + ((band.token + r / group) * heads.N + k * group + r % group) * H;
    const float sum = state[1] == 0 ? 0 : state[1] + sink_weight(heads, k * group + r % group, state[0]);
    for (int64_t h = 0; h < H; h++) to[h] = sum == 0 ? 0 : state[2 + h] / sum;
  }

  // Compute key-value head k of a band.
  void attend_band(float* y, const Band& band, int64_t k) const {
    thread_local Scratch scratch;
    thread_local AlignedVector<float> states, next;
    gather_queries(scratch, band, k);
    const int64_t rows = band.count * group, stride = H + 2;
    states.assign(rows * stride, 0);
    next.resize(rows * stride);
    for (int64_t r = 0; r < rows; r++) states[r * stride] = MASKED;
    for (int64_t span = first_span(band); span <= last_span(band); span++) {
      attend_span(next.data(), scratch, band, k, span * SPAN);
      for (int64_t r = 0; r < rows; r++) join_state(&states[r * stride], &next[r * stride], H);
    }
    for (int64_t r = 0; r < rows; r++) write_output(y, band, k, r, &states[r * stride]);
  }

  // The same in two steps, if there are too few bands for all threads: the states of single spans, then their sums.
  // `states` has room for `max_spans` spans of each head.
  void attend_spans(const Thread& thread, float* y, const std::vector<Band>& bands, float* states,
                    int64_t max_spans) const {
    thread_local Scratch scratch;
    const int64_t stride = H + 2, tasks = bands.size() * heads.K * max_spans;
    for (int64_t task = thread.first(tasks); task < thread.last(tasks); task++) {
      const Band& band = bands[task / max_spans / heads.K];
      const int64_t k = task / max_spans % heads.K, span = first_span(band) + task % max_spans;
      if (span > last_span(band)) continue;
      gather_queries(scratch, band, k);
      attend_span(states + task * group * stride, scratch, band, k, span * SPAN);
    }
#pragma omp barrier
    std::vector<float> joined(stride);
    const int64_t total = bands.size() * heads.N;
    for (int64_t row = thread.first(total); row < thread.last(total); row++) {
      const Band& band = bands[row / heads.N];
      const int64_t k = row % heads.N / group, r = row % group, spans = last_span(band) - first_span(band) + 1;
      const float* first = states + (row / heads.N * heads.K + k) * max_spans * group * stride + r * stride;
      std::fill(joined.begin(), joined.end(), 0.f);
      joined[0] = MASKED;
      for (int64_t i = 0; i < spans; i++) join_state(joined.data(), first + i * group * stride, H);
      write_output(y, band, k, r, joined.data());
    }
  }
};

// Compute y (T, N H) from the rotated queries in projected (T, width) and keys that are in the pages; called by all
// threads.
template <class Element>
void attend_stored(const Thread& thread, float* y, float* states, const float* projected, int64_t width,
                   const PackedBatch& batch, const AttentionSchedule& schedule, const PageView& pages,
                   const Heads& heads) {
  const PagedAttention<Element> attention{batch, pages, heads, projected, width};
  if (schedule.divides_spans(thread, heads)) {
    attention.attend_spans(thread, y, schedule.bands, states, schedule.max_spans);
  } else {
    const int64_t last = schedule.first_task(thread.number + 1, thread, heads.K);
    for (int64_t task = schedule.first_task(thread.number, thread, heads.K); task < last; task++)
      attention.attend_band(y, schedule.bands[task / heads.K], task % heads.K);
  }
#pragma omp barrier
}

// Store the new keys and values and compute y (T, N H); called by all threads.
template <class Element>
void attend_packed(const Thread& thread, float* y, float* states, float* projected, const PackedBatch& batch,
                   const AttentionSchedule& schedule, const PageView& pages, const Heads& heads) {
  store_tokens<Element>(thread, projected, batch, pages, heads);
#pragma omp barrier
  const int64_t width = (heads.N + 2 * heads.K) * heads.H;
  attend_stored<Element>(thread, y, states, projected, width, batch, schedule, pages, heads);
}

// Compute cross-attention y (T, N H) of queries (T, N H); called by all threads. The pages hold the keys and values of the
// sources, and the batch says for each token how many of them it attends to: all up to its `position`.
template <class Element>
void attend_sources(const Thread& thread, float* y, float* states, float* queries, const PackedBatch& batch,
                    const AttentionSchedule& schedule, const PageView& pages, const Heads& heads) {
  const int64_t H = heads.H;
  for (int64_t row = thread.first(batch.num_tokens) * heads.N; row < thread.last(batch.num_tokens) * heads.N; row++)
    normalize(queries + row * H, queries + row * H, H, heads.query_norm);
#pragma omp barrier
  attend_stored<Element>(thread, y, states, queries, heads.N * H, batch, schedule, pages, heads);
}
