"""Triton kernels for latent attention over pages, in the absorbed form (model/latent_attention.py).

store_latent[grid](...)      normalize the latent, rotate the key that all heads share, write both to their slot
attend_latent[grid](...)     softmax(q · [latent | key]) latent, for some heads of some tokens
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_heads import norm_and_rotate


@triton.jit
def store_latent(
    compressed, row_stride, latents, rotary_keys, slots, positions, seats, page_tables, cosine, sine, norm, epsilon,
    table_stride,
    R: tl.constexpr, BLOCK_R: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT_OFFSET: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Write one token, given as compressed (T, R + H) with rows of `row_stride`, to its slot.

    With DECODE, row t belongs to a seat, which has a position and a page table; otherwise token t has both.
    """
    token = tl.program_id(0).to(tl.int64)
    if DECODE:
        seat = tl.load(seats + token)
        if seat < 0:
            return
        position = tl.load(positions + seat)
        page = tl.load(page_tables + seat.to(tl.int64) * table_stride + position // PAGE).to(tl.int64)
        slot = page * PAGE + position % PAGE
    else:
        slot, position = tl.load(slots + token), tl.load(positions + token)
    r, h = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_H)
    row = compressed + token * row_stride
    latent = tl.load(row + r, r < R, 0.0).to(tl.float32)
    gain = tl.load(norm + r, r < R, 0.0).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent, 0) / R + epsilon) * (gain + 1 if UNIT_OFFSET else gain)
    tl.store(latents + slot * R + r, latent.to(latents.dtype.element_ty), r < R)
    key = norm_and_rotate(
        row + R + tl.zeros((1, 1), tl.int32), norm, epsilon, cosine, sine, position,
        PAIRS, H, BLOCK_H, INTERLEAVED, False, 0,
    )  # fmt: skip
    tl.store(rotary_keys + slot * H + h[None, :], key.to(rotary_keys.dtype.element_ty), (h < H)[None, :])


@triton.jit
def attend_latent(
    y, states, query, rotary_query, latents, rotary_keys, block_sequences, block_starts, sequence_starts, lengths,
    positions, page_tables, cosine, sine, num_tokens, table_stride, rotary_stride, head_stride, scale,
    N: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, H: tl.constexpr,
    BLOCK_H: tl.constexpr, PAGE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, DECODE: tl.constexpr,
    SPANS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend with HEADS heads of the tokens of one block. y, query (N, T, R): absorbed. rotary_query: not yet rotated.

    With DECODE, a block is one row: block_sequences holds its seat, and `positions` that of the seat's new token.
    Head n of token t of rotary_query is at t · rotary_stride + n · head_stride.
    scale: times log2(e). states (N, T, SPANS, R + 2) float32: results of the spans of the keys, if there are several.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(block_sequences + block)
    if sequence < 0:
        return
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    h, NUM_TOKENS = tl.arange(0, BLOCK_H), BLOCK_M // HEADS
    if DECODE:
        token = tl.zeros((BLOCK_M,), tl.int32) + block
        position = tl.load(positions + sequence).to(tl.int32) + tl.zeros((BLOCK_M,), tl.int32)
        is_real = m < HEADS
    else:
        end = tl.load(sequence_starts + sequence + 1)
        token = tl.load(block_starts + block) + m // HEADS
        is_real = (token < end) & (m // HEADS < NUM_TOKENS)
        token = tl.minimum(token, end - 1)
        position = token + tl.load(lengths + sequence) - end
    n = tl.minimum(group * HEADS + m % HEADS, N - 1)
    is_real = is_real & (group * HEADS + m % HEADS < N)
    place = (n.to(tl.int64) * num_tokens + token) * R
    q = tl.load(query + place[:, None] + r[None, :], (r < R)[None, :], 0.0)
    q = (q.to(tl.float32) * scale).to(latents.dtype.element_ty)
    rotary = rotary_query + token[:, None].to(tl.int64) * rotary_stride + n[:, None] * head_stride
    rotary = norm_and_rotate(
        rotary, query, 0.0, cosine, sine, position[:, None], PAIRS, H, BLOCK_H, INTERLEAVED, False, 0
    )
    rotary = (rotary * scale).to(rotary_keys.dtype.element_ty)
    table = page_tables + sequence.to(tl.int64) * table_stride
    largest, total = tl.full((BLOCK_M,), -1e30, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    output = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    stop = tl.max(position, 0) + 1
    span_length = tl.cdiv(tl.cdiv(stop, SPANS), BLOCK_N) * BLOCK_N
    start = tl.program_id(2) * span_length
    stop = tl.minimum(stop, start + span_length)
    for first in range(start, stop, BLOCK_N):
        slot = first + tl.arange(0, BLOCK_N)
        rows = tl.load(table + slot // PAGE, slot < stop, 0).to(tl.int64) * PAGE + slot % PAGE
        inside = (slot < stop)[:, None]
        latent = tl.load(latents + rows[:, None] * R + r[None, :], inside & (r < R)[None, :], 0.0)
        key = tl.load(rotary_keys + rows[:, None] * H + h[None, :], inside & (h < H)[None, :], 0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(rotary, tl.trans(key), input_precision="ieee")
        scores = tl.where(slot[None, :] <= position[:, None], scores, -1e30)
        highest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        rescale = tl.exp2(largest - highest)
        output = output * rescale[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        largest = highest
    is_real = is_real[:, None]
    if SPANS == 1:
        output /= total[:, None]
        tl.store(y + place[:, None] + r[None, :], output.to(y.dtype.element_ty), is_real & (r < R)[None, :])
    else:
        state = states + ((n.to(tl.int64) * num_tokens + token) * SPANS + tl.program_id(2))[:, None] * (R + 2)
        tl.store(state, largest[:, None], is_real)
        tl.store(state + 1, total[:, None], is_real)
        tl.store(state + 2 + r[None, :], output, is_real & (r < R)[None, :])


@triton.jit
def join_latent(y, states, seats, num_tokens, R: tl.constexpr, BLOCK_R: tl.constexpr, SPANS: tl.constexpr):
    """Join the spans of one head and token, weighted by their sums (the second half of Flash-Decoding)."""
    place, r = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_R)
    if tl.load(seats + place % num_tokens) < 0:
        return
    s = tl.arange(0, SPANS)
    state = states + (place * SPANS + s) * (R + 2)
    largest = tl.load(state)
    weights = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(tl.load(state + 1) * weights, 0)
    output = tl.load(state[:, None] + 2 + r[None, :], (r < R)[None, :], 0.0)
    output = tl.sum(output * weights[:, None], 0) / total
    tl.store(y + place * R + r, output.to(y.dtype.element_ty), r < R)
