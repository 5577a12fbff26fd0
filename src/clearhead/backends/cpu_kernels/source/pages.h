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

// Turn the scores (SPAN,) of one query into weights: 0 outside of [first, last). Return their sum and the largest score.
// It is never inlined, so that all rows get the same bits.
[[gnu::noinline]] inline void weigh_scores(float* row, int64_t first, int64_t last, float* largest, float* sum) {
  // With indices of 32 bits, as many of them fit into a vector as scores.
  const int32_t low = int32_t(std::clamp<int64_t>(first, 0, SPAN)), high = int32_t(std::clamp<int64_t>(last, 0, SPAN));
  for (int32_t i = 0; i < low; i++) row[i] = MASKED;
  for (int32_t i = high; i < SPAN; i++) row[i] = MASKED;
  Vector tops = load(row), sums = {};
  for (int64_t i = 16; i < SPAN; i += 16) tops = tops < load(row + i) ? load(row + i) : tops;
  const float top = largest_lane(tops);
  for (int32_t i = 0; i < SPAN; i++) row[i] = i >= low && i < high ? exponential(row[i] - top) : 0;
  for (int64_t i = 0; i < SPAN; i += 16) sums += load(row + i);
  *largest = top;
  *sum = sum_of_lanes(sums);
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
  const float* projected;  // (T, (N + 2K) H), the queries rotated

  const int64_t H = heads.H, group = heads.N / heads.K, padded = round_up(heads.H);

  // Memory of one thread.
  struct Scratch {
    std::vector<float> queries, keys, values, scores, out;
  };

  static int64_t round_up(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

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
    auto add = [&](Sums& sums, const Sums& others) {  // the compiler may reorder a +, but not a fused_add
      const Vector unit = broadcast(1.f);
      CLEARHEAD_UNROLL
      for (int r = 0; r < rows; r++) {
        sums[r][0] = fused_add(sums[r][0], others[r][0], unit);
        sums[r][1] = fused_add(sums[r][1], others[r][1], unit);
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
    for (int64_t r = 0; r < rows; r++) {
      const int64_t position = batch.positions[band.token + r / group];
      float* state = states + r * (H + 2);
      const int64_t begin = pages.first_slot(position) - first, end = position + 1 - first;
      const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, SPAN);
      const ScoreTerms terms = pages.terms(k * group + r % group, position, first + from);
      if (adjusts_scores(heads, terms)) adjust_scores(scores + r * SPAN + from, to - from, heads, terms);
      weigh_scores(scores + r * SPAN, begin, end, state, state + 1);
    }
    add_values(states, scratch, band, k, first, begin, count);
  }

  // Multiply the weights with the values.
  void add_values(float* states, Scratch& scratch, const Band& band, int64_t k, int64_t first, int64_t begin,
                  int64_t count) const {
    const Element* blocks[SPAN / BLOCK] = {};
    for (int64_t s = begin; s < count; s += BLOCK) blocks[s / BLOCK] = block(pages.values, band.sequence, k, first + s);
    const int64_t rows = band.count * group;
    for (int64_t r = 0; r < rows; r += BAND)
      in_tiles<BAND>(rows - r, [&](auto tile) {
        float* out = scratch.out.data();
        const float* weights = &scratch.scores[r * SPAN];
        if (H % PANEL == 0) {
          for (int64_t h = 0; h < H; h += PANEL) multiply_values<tile.value>(out + h, weights, blocks, h, H, begin, count);
        } else {
          const float* copies[SPAN / BLOCK];
          if (r == 0) copy_values(scratch.values.data(), blocks, begin, count);
          for (int64_t i = 0; i < SPAN / BLOCK; i++) copies[i] = &scratch.values[i * BLOCK * padded];
          for (int64_t h = 0; h < padded; h += PANEL)
            multiply_values<tile.value>(out + h, weights, copies, h, padded, begin, count);
        }
        for (int64_t i = 0; i < tile.value; i++)
          std::copy(out + i * padded, out + i * padded + H, states + (r + i) * (H + 2) + 2);
      });
  }

  // Compute PANEL columns of `rows` outputs (rows, padded): the sums of the weights times the values, slot by slot.
  template <int rows, class Value>
  void multiply_values(float* out, const float* weights, const Value* const (&blocks)[SPAN / BLOCK], int64_t h,
                       int64_t slot_stride, int64_t begin, int64_t count) const {
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
    store_sums(out, padded, sums);
  }

  // Convert values to floats (SPAN, padded), for head widths that are not whole panels.
  void copy_values(float* to, const Element* const (&blocks)[SPAN / BLOCK], int64_t begin, int64_t count) const {
    for (int64_t s = begin; s < count; s++)
      for (int64_t h = 0; h < padded; h++) to[s * padded + h] = h < H ? read(blocks[s / BLOCK][s % BLOCK * H + h]) : 0;
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
    const int64_t rows = band.count * group, width = (heads.N + 2 * heads.K) * H;
    scratch.queries.resize(std::max<size_t>(scratch.queries.size(), rows * H));
    scratch.keys.resize(std::max<size_t>(scratch.keys.size(), H * SPAN));
    scratch.values.resize(std::max<size_t>(scratch.values.size(), SPAN * padded));
    scratch.scores.resize(std::max<size_t>(scratch.scores.size(), rows * SPAN));
    scratch.out.resize(std::max<size_t>(scratch.out.size(), BAND * padded));
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
    thread_local std::vector<float> states, next;
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

// Compute y (T, N H) from rotated queries and keys that are in the pages; called by all threads.
template <class Element>
void attend_stored(const Thread& thread, float* y, float* states, const float* projected, const PackedBatch& batch,
                   const AttentionSchedule& schedule, const PageView& pages, const Heads& heads) {
  const PagedAttention<Element> attention{batch, pages, heads, projected};
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
  attend_stored<Element>(thread, y, states, projected, batch, schedule, pages, heads);
}
