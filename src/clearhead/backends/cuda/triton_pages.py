"""A Triton kernel for the attention of one new token of each sequence over its pages, read in place.

    attend_pages[grid](...)      rotate query and key, store key and value, softmax(q Kᵀ) V

With CROSS there is no new key: the query attends to the pages of a source that the encoder has read.

Several programs divide the keys of a long sequence (Flash-Decoding), so that a few long texts keep all multiprocessors
busy; short sequences are not divided. Pages outside of a window are not read. The reference is PackedCache with the
modules of model/ (tests/backends/cuda/test_pages.py).
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_heads import adjust_scores, bucket_bias, norm_and_rotate, query_factor


@triton.jit
def attend_pages(
    y, states, num_finished, projected, keys, values, seats, positions, page_tables, cosine, sine, query_norm, key_norm,
    bias, buckets, table_stride, window, chunk, scale, epsilon, softcap, temperature, floor,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr, CROSS: tl.constexpr, PDL: tl.constexpr,
    CAPPED: tl.constexpr, ALIBI: tl.constexpr, REACH: tl.constexpr, TEMPERED: tl.constexpr, NORMED_AFTER: tl.constexpr,
    GROUP: tl.constexpr, SPANS: tl.constexpr, MIN_SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend with one key-value head of one sequence over one span of its keys; the last program joins all spans.

    projected (B, (N + 2K) H): queries, keys and values side by side. keys, values (pages, K, PAGE, H). seats (B,): the
    row of each sequence in `positions`, which holds the position of its new token, and `page_tables`; -1: no sequence.
    window: number of tokens to attend to, including the new one. chunk: tokens attend within chunks of this length.
    bias, buckets, REACH: slopes (N,) with ALIBI; for T5's bias those of bucket_bias; REACH 0: none.
    CROSS: projected (B, N H) has queries only, and `positions` holds the number of keys of each source.
    GROUP: query heads per key-value head, padded for tl.dot. MIN_SPAN: spans have at least this length.
    """
    b, head, span = tl.program_id(0) // K, tl.program_id(0) % K, tl.program_id(1)
    g = tl.arange(0, GROUP)
    PER_HEAD: tl.constexpr = N // K
    # The previous kernel writes none of this: positions, tables and the past were complete when the step began.
    seat = tl.load(seats + b)
    NUM_NEW: tl.constexpr = 0 if CROSS else 1
    position = tl.load(positions + seat, seat >= 0, -NUM_NEW).to(tl.int32)
    num_keys = position + NUM_NEW
    oldest = tl.maximum(tl.maximum(num_keys - window, position // chunk * chunk), 0)
    span_length = tl.maximum(tl.cdiv(tl.cdiv(num_keys - oldest, SPANS), BLOCK) * BLOCK, MIN_SPAN)
    num_used = tl.cdiv(num_keys - oldest, span_length)
    n = head * PER_HEAD + tl.minimum(g, PER_HEAD - 1)
    if span >= num_used:
        if (seat < 0) & (span == 0):  # no sequence: nobody reads the result, but it should be finite
            _store_zeros(y, b, n, N, H, BLOCK_H, GROUP, PDL)
        return
    first = oldest + span * span_length
    last = tl.minimum(first + span_length, position)
    table = page_tables + seat.to(tl.int64) * table_stride
    slot = first + tl.arange(0, BLOCK)
    page = tl.load(table + slot // PAGE, slot < last, 0)
    k, v = _load_tiles(keys, values, page, head, slot, last, K, H, BLOCK_H, PAGE)
    page = tl.load(table + (slot + BLOCK) // PAGE, slot + BLOCK < last, 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # The queries of this head as a (GROUP, BLOCK_H) tile; rows beyond PER_HEAD repeat the last one, never stored.
    row = projected + b.to(tl.int64) * (N if CROSS else N + 2 * K) * H
    q = norm_and_rotate(
        row + n[:, None] * H, query_norm, epsilon, cosine, sine, position,
        PAIRS, H, BLOCK_H, INTERLEAVED, NORMED, UNIT_OFFSET, NORMED_AFTER,
    )  # fmt: skip
    q = (q * query_factor(position, scale, temperature, floor, TEMPERED)).to(keys.dtype.element_ty)
    slope = tl.load(bias + n)[:, None] if ALIBI else scale
    largest = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    output = tl.zeros((GROUP, BLOCK_H), tl.float32)
    if span == (-1 if CROSS else num_used - 1):  # this span stores the new token and attends to it
        new_key, new_value = _store_token(
            row, keys, values, table, head, position, key_norm, epsilon, cosine, sine,
            N, K, H, BLOCK_H, PAGE, PAIRS, INTERLEAVED, NORMED, UNIT_OFFSET, NORMED_AFTER,
        )  # fmt: skip
        largest = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1)
        largest = adjust_scores(largest, slope, 0, softcap, CAPPED, False)
        if REACH:
            largest += bucket_bias(bias, buckets, n, 0, N, REACH)
        total += 1.0
        output += new_value.to(tl.float32)
    for _ in range(first, last, BLOCK):
        scores = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32)
        scores = adjust_scores(scores, slope, (position - slot)[None, :], softcap, CAPPED, ALIBI)
        if REACH:
            scores += bucket_bias(bias, buckets, n[:, None], (position - slot)[None, :], N, REACH)
        scores = tl.where((slot < last)[None, :], scores, -1e30)
        highest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        rescale = tl.exp(largest - highest)
        output = output * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        largest = highest
        slot += BLOCK
        k, v = _load_tiles(keys, values, page, head, slot, last, K, H, BLOCK_H, PAGE)
        page = tl.load(table + (slot + BLOCK) // PAGE, slot + BLOCK < last, 0)  # one round ahead of its tiles
    _finish(y, states, num_finished, b, n, g, span, num_used, largest, total, output, N, H, BLOCK_H, GROUP, SPANS, K)


@triton.jit
def _store_zeros(
    y, b, n, N: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr
):
    """Store zeros as the output of heads n of row b."""
    h = tl.arange(0, BLOCK_H)
    if PDL:
        tl.extra.cuda.gdc_wait()
    target = y + (b.to(tl.int64) * N + n[:, None]) * H + h[None, :]
    tl.store(target, tl.zeros((GROUP, BLOCK_H), y.dtype.element_ty), (h < H)[None, :])


@triton.jit
def _store_token(
    row, keys, values, table, head, position, key_norm, epsilon, cosine, sine,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr, NORMED_AFTER: tl.constexpr,
):  # fmt: skip
    """Write the key and value of the new token to its page, and return both (1, BLOCK_H)."""
    h = tl.arange(0, BLOCK_H)
    key = norm_and_rotate(
        row + (N + head) * H + tl.zeros((1, 1), tl.int32), key_norm, epsilon, cosine, sine, position,
        PAIRS, H, BLOCK_H, INTERLEAVED, NORMED, UNIT_OFFSET, NORMED_AFTER,
    )  # fmt: skip
    key, inside = key.to(keys.dtype.element_ty), (h < H)[None, :]
    value = tl.load(row + (N + K + head) * H + h[None, :], inside, 0.0).to(values.dtype.element_ty)
    place = (tl.load(table + position // PAGE).to(tl.int64) * K + head) * PAGE + position % PAGE
    tl.store(keys + place * H + h[None, :], key, inside)
    tl.store(values + place * H + h[None, :], value, inside)
    return key, value


@triton.jit
def _load_tiles(
    keys, values, page, head, slot, last, K: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr
):
    """Load the keys and values (slots, BLOCK_H) of slots before `last` from pages (pages, K, PAGE, H)."""
    h = tl.arange(0, BLOCK_H)
    tile = ((page.to(tl.int64) * K + head) * PAGE + slot % PAGE)[:, None] * H + h[None, :]
    inside = (slot < last)[:, None] if H == BLOCK_H else (slot < last)[:, None] & (h < H)[None, :]
    return tl.load(keys + tile, inside, 0.0), tl.load(values + tile, inside, 0.0)


@triton.jit
def _finish(
    y, states, num_finished, b, n, g, span, num_used, largest, total, output,
    N: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Store the output of a sequence with one span; of several spans, the last one to finish joins all."""
    h = tl.arange(0, BLOCK_H)
    PER_HEAD: tl.constexpr = N // K
    is_real = (g < PER_HEAD)[:, None] & (h < H)[None, :]
    target = y + (b.to(tl.int64) * N + n[:, None]) * H + h[None, :]
    if num_used == 1:
        tl.store(target, (output / total[:, None]).to(y.dtype.element_ty), is_real)
    else:
        WIDTH: tl.constexpr = BLOCK_H + 2
        state = states + ((tl.program_id(0) * SPANS + span) * GROUP + g) * WIDTH
        tl.store(state, largest, g < PER_HEAD)
        tl.store(state + 1, total, g < PER_HEAD)
        tl.store(state[:, None] + 2 + h[None, :], output, (g < PER_HEAD)[:, None])
        tl.debug_barrier()
        num_before = tl.atomic_add(num_finished + tl.program_id(0), 1, sem="acq_rel")
        if num_before == num_used - 1:
            tl.store(num_finished + tl.program_id(0), 0)
            output = _join_spans(states, g, num_used, BLOCK_H, GROUP, SPANS, PER_HEAD)
            tl.store(target, output.to(y.dtype.element_ty), is_real)


@triton.jit
def _join_spans(
    states, g, num_used,
    BLOCK_H: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Join the spans' outputs, weighted by their sums (the second half of Flash-Decoding).

    The loop is unrolled, so that all loads are in flight at once.
    """
    h, is_real = tl.arange(0, BLOCK_H), g < PER_HEAD
    WIDTH: tl.constexpr = BLOCK_H + 2
    largest = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    output = tl.zeros((GROUP, BLOCK_H), tl.float32)
    for span in tl.static_range(SPANS):
        part = states + ((tl.program_id(0) * SPANS + span) * GROUP + g) * WIDTH
        used = g < tl.where(num_used > span, PER_HEAD, 0)
        part_largest = tl.load(part, used, -1e30, cache_modifier=".cg")
        part_total = tl.load(part + 1, used, 0.0, cache_modifier=".cg")
        part_output = tl.load(part[:, None] + 2 + h[None, :], used[:, None], 0.0, cache_modifier=".cg")
        highest = tl.maximum(largest, part_largest)
        rescale, weight = tl.exp(largest - highest), tl.exp(part_largest - highest)
        output = output * rescale[:, None] + part_output * weight[:, None]
        total = total * rescale + part_total * weight
        largest = highest
    return output / tl.where(is_real, total, 1.0)[:, None]
