"""Triton kernels for packed prompts: tokens of many sequences side by side attend to the pages of their sequences.

    store_keys[grid](...)        normalize and rotate the new keys, write keys and values to their slots
    attend_chunks[grid](...)     softmax(q Kᵀ) V for blocks of queries (FlashAttention, Dao 2023)

A program of `attend_chunks` has the queries of a few adjacent tokens of one sequence, for all heads that share a
key-value head. The keys of earlier chunks and of shared prefixes are in the same pages as the new ones. With
BIDIRECTIONAL, queries attend to all keys of their sequence: in an encoder, and from a target to its source.
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_heads import adjust_scores, bucket_bias, norm_and_rotate, query_factor


@triton.jit
def store_keys(
    projected, keys, values, slots, positions, cosine, sine, key_norm, epsilon,
    N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr,
    PAGE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, NORMED_AFTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of one token, given as projected (T, (N + 2K) H), to its slot."""
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot, position = tl.load(slots + token), tl.load(positions + token)
    k, h = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_H)
    head = tl.minimum(k, K - 1)  # heads beyond K repeat the last one and are not stored
    row = projected + token * (N + 2 * K) * H
    key = norm_and_rotate(
        row + (N + head[:, None]) * H, key_norm, epsilon, cosine, sine, position,
        PAIRS, H, BLOCK_H, INTERLEAVED, NORMED, UNIT_OFFSET, NORMED_AFTER,
    )  # fmt: skip
    inside = (k < K)[:, None] & (h < H)[None, :]
    value = tl.load(row + (N + K + head[:, None]) * H + h[None, :], inside, 0.0)
    target = ((slot // PAGE * K + k[:, None]) * PAGE + slot % PAGE) * H + h[None, :]
    tl.store(keys + target, key.to(keys.dtype.element_ty), inside)
    tl.store(values + target, value.to(values.dtype.element_ty), inside)


@triton.jit
def attend_chunks(
    y, projected, keys, values, block_sequences, block_starts, sequence_starts, lengths, page_tables,
    cosine, sine, query_norm, bias, buckets,
    table_stride, window, chunk, scale, epsilon, softcap, temperature, floor,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, ALIBI: tl.constexpr, REACH: tl.constexpr, TEMPERED: tl.constexpr, NORMED_AFTER: tl.constexpr,
    ROW: tl.constexpr, BIDIRECTIONAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of a block of tokens, for the N / K heads of one key-value head.

    projected (T, ROW): queries, and what may follow them in a row; keys and values are in the pages already. lengths:
    number of keys of each sequence; without BIDIRECTIONAL, its last ones are those of these tokens.
    block_sequences, block_starts: the sequence of each block, -1 for none, and its first token among all T.
    window, chunk: as in attend_pages, like bias, buckets and REACH; WINDOWED if one of them restricts anything.
    scale, softcap: times log2(e).
    """
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest blocks first
    PER_HEAD: tl.constexpr = N // K
    NUM_TOKENS: tl.constexpr = BLOCK_M // PER_HEAD
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence = tl.load(block_sequences + block)
    if sequence < 0:
        return
    first_token, end = tl.load(block_starts + block), tl.load(sequence_starts + sequence + 1)
    shift = tl.load(lengths + sequence) - end  # position = token + shift
    m, h = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H)
    token = first_token + m // PER_HEAD
    is_real = (token < end) & (m // PER_HEAD < NUM_TOKENS)
    token = tl.minimum(token, end - 1)
    position = token + shift
    n = head * PER_HEAD + m % PER_HEAD
    row = projected + token[:, None].to(tl.int64) * ROW
    q = norm_and_rotate(
        row + n[:, None] * H, query_norm, epsilon, cosine, sine, position[:, None],
        PAIRS, H, BLOCK_H, INTERLEAVED, NORMED, UNIT_OFFSET, NORMED_AFTER,
    )  # fmt: skip
    q = (q * query_factor(position[:, None], scale, temperature, floor, TEMPERED)).to(keys.dtype.element_ty)
    slope = tl.load(bias + n)[:, None] * 1.4426950408889634 if ALIBI else scale
    table = page_tables + sequence.to(tl.int64) * table_stride
    largest = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    output = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    first_position = first_token + shift
    last_position = tl.minimum(first_token + NUM_TOKENS, end) - 1 + shift
    if BIDIRECTIONAL:
        first_position = end - 1 + shift
        last_position = first_position
    start = 0
    if WINDOWED:
        start = _oldest(first_position, window, chunk) // BLOCK_N * BLOCK_N
    else:  # keys that every query of the block attends to
        full = (first_position + 1) // BLOCK_N * BLOCK_N
        largest, total, output = _accumulate(
            q, keys, values, table, position, head, n, largest, total, output, 0, full, window, chunk,
            slope, bias, buckets, softcap, N, K, H, BLOCK_H, PAGE, BLOCK_N, False, False, BIDIRECTIONAL, CAPPED, ALIBI,
            REACH,
        )  # fmt: skip
        start = full
    largest, total, output = _accumulate(
        q, keys, values, table, position, head, n, largest, total, output, start, last_position + 1, window, chunk,
        slope, bias, buckets, softcap, N, K, H, BLOCK_H, PAGE, BLOCK_N, True, WINDOWED, BIDIRECTIONAL, CAPPED, ALIBI,
        REACH,
    )  # fmt: skip
    target = y + (token[:, None].to(tl.int64) * N + n[:, None]) * H + h[None, :]
    output = output / tl.where(is_real, total, 1.0)[:, None]
    tl.store(target, output.to(y.dtype.element_ty), is_real[:, None] & (h < H)[None, :])


@triton.jit
def _oldest(position, window, chunk):
    """Return the first position that a query at `position` attends to."""
    return tl.maximum(tl.maximum(position + 1 - window, position // chunk * chunk), 0)


@triton.jit
def _accumulate(
    q, keys, values, table, position, head, n, largest, total, output, start, stop, window, chunk, slope, bias, buckets,
    softcap,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, BIDIRECTIONAL: tl.constexpr, CAPPED: tl.constexpr,
    ALIBI: tl.constexpr, REACH: tl.constexpr,
):  # fmt: skip
    """Add the keys from `start` to `stop` to the running softmax. Without MASKED, all queries attend to all of them."""
    h = tl.arange(0, BLOCK_H)
    for first in range(start, stop, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        page = tl.load(table + slot // PAGE, slot < stop, 0) if MASKED else tl.load(table + slot // PAGE)
        tile = ((page.to(tl.int64) * K + head) * PAGE + slot % PAGE)[:, None] * H + h[None, :]
        if MASKED or H != BLOCK_H:
            inside = (slot < stop)[:, None] & (h < H)[None, :]
            k, v = tl.load(keys + tile, inside, 0.0), tl.load(values + tile, inside, 0.0)
        else:
            k, v = tl.load(keys + tile), tl.load(values + tile)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = adjust_scores(scores, slope, position[:, None] - slot[None, :], softcap, CAPPED, ALIBI)
        if REACH:
            distance = position[:, None] - slot[None, :]
            scores += bucket_bias(bias, buckets, n[:, None], distance, N, REACH) * 1.4426950408889634
        if MASKED:
            allowed = slot[None, :] < (stop if BIDIRECTIONAL else position[:, None] + 1)
            if WINDOWED:
                allowed = allowed & (slot[None, :] >= _oldest(position, window, chunk)[:, None])
            scores = tl.where(allowed, scores, -1e30)
        highest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        if WINDOWED:  # a block may have no key at all for a query, whose weights would otherwise be 1
            weights = tl.where(allowed, weights, 0.0)
        rescale = tl.exp2(largest - highest)
        output = output * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        largest = highest
    return largest, total, output
