"""Triton kernels that turn logits into tokens without sorting the vocabulary; sampling/choose.py is their reference.

    scan_logits[B, chunks](...)        per chunk: the largest value and Σ exp
    draw_candidates[B, chunks](...)    the tokens whose value with Gumbel noise is large enough to win the draw
    add_noise_to_candidates[B](...)    their values with noise
    check_candidates[B, chunks](...)   which probability comes after the best of them, and how many tokens before
    choose_tokens[B](...)              join the chunks, apply the filters, store the token

The filters top_k, top_p and min_p keep the first tokens in the order of likelihood; of equal tokens, the one with the
lower id is first. The winner of the draw over all tokens is therefore also the winner over those that the filters keep,
if they keep it. Otherwise the best candidate that comes before it is next. If no candidate decides, which is rare,
triton_filters.py searches all tokens again.
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_candidates import best_before, join_chunks, judge
from clearhead.backends.cuda.triton_filters import draw_before, filter_draw
from clearhead.backends.cuda.triton_logits import (
    ADJUSTED,
    GOLDEN,
    MIN_P,
    POSITION,
    STEP,
    TAIL,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    add_noise,
    count_up,
    draw_state,
    read_logits,
    scramble,
    wait_for_previous,
)

# The winner's value is log Σ exp(value) plus Gumbel noise, which is above -2.5 except once in 200,000 draws.
_MARGIN = tl.constexpr(2.5)  # about e^2.5 = 12 tokens exceed the bound


@triton.jit
def scan_logits(
    maxima, places, sums, num_candidates, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Reduce one chunk of the logits (B, V) of one row. The maximum is NaN if a logit is.

    maxima, sums (B, chunks) float32: the largest value and Σ exp(value - largest); places (B, chunks) int32: its token.
    """
    wait_for_previous(PDL)
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seat = tl.load(seats + b)
    if seat < 0:
        return
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    z = read_logits(logits + b * V, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
    largest = tl.max(z, 0)
    has_nan = tl.max((z != z).to(tl.int32), 0) != 0
    target = b * tl.num_programs(1) + chunk
    tl.store(maxima + target, tl.where(has_nan, float("nan"), largest))
    tl.store(places + target, tl.min(tl.where(z == largest, v, V), 0))
    if tl.load(numbers + TEMPERATURE * num_seats + seat) > 0:
        tl.store(sums + target, tl.sum(tl.exp(z - tl.maximum(largest, -1e38)), 0))
        tl.store(num_candidates + b, 0, chunk == 0)


@triton.jit
def lower_bound(largest, total, min_p):
    """Return a bound that the winner of the draw, with its noise, exceeds almost surely.

    What min_p keeps may have little of the probability, but at least that of the most likely token.
    """
    return largest - _MARGIN + tl.where(min_p > 0, 0.0, tl.log(total.to(tl.float32)))


@triton.jit
def draw_candidates(
    num_candidates, candidate_values, candidate_places,
    maxima, sums, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Collect all tokens of one chunk that may exceed the bound with their noise, and few others.

    num_candidates (B,) may exceed MAX, but only MAX are stored: candidate_values (B, MAX) float32, without noise, and
    candidate_places (B, MAX) int32, their tokens.
    """
    wait_for_previous(PDL)
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seat = tl.load(seats + b)
    if seat < 0:
        return
    if tl.load(numbers + TEMPERATURE * num_seats + seat) == 0:
        return
    largest, total = join_chunks(maxima, sums, b, CHUNKS, BLOCK_C)
    min_p = tl.load(numbers + MIN_P * num_seats + seat)
    lowest = tl.where(min_p > 0, largest + tl.log(min_p), float("-inf"))  # what min_p removes cannot win
    bound = lower_bound(largest, total, min_p)
    counters = count_up(draw_state(integers, seat, num_seats), (chunk * CHUNK + tl.arange(0, BLOCK)).to(tl.uint64))
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = read_logits(logits + b * V, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
        # -log(-log(u)) > bound - z means -log(u) < exp(z - bound), and 1 - u is less than -log(u). The upper 32 bits
        # of u decide that for all but a few tokens, whose noise add_noise_to_candidates computes in float64.
        upper = (scramble(counters) >> 32).to(tl.uint32)
        counters += tl.full((BLOCK,), BLOCK, tl.uint64) * GOLDEN
        rest = (upper ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32
        passes = (rest < tl.exp(z - bound) * 1.00001 + 1e-12) & (z >= lowest)
        ones = passes.to(tl.int32)
        number = tl.sum(ones, 0)
        if number != 0:
            place = tl.atomic_add(num_candidates + b, number, sem="relaxed") + tl.cumsum(ones, 0) - 1
            tl.store(candidate_values + b * MAX + place, z, passes & (place < MAX))
            tl.store(candidate_places + b * MAX + place, v, passes & (place < MAX))


@triton.jit
def add_noise_to_candidates(
    num_candidates, candidates, candidate_values, candidate_places, maxima, sums, seats, integers, numbers, num_seats,
    CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the values of the candidates of a row with noise, in float64; -inf for those below the bound."""
    wait_for_previous(PDL)
    b, m = tl.program_id(0).to(tl.int64), tl.arange(0, MAX)
    seat = tl.load(seats + b)
    if seat < 0:
        return
    if tl.load(numbers + TEMPERATURE * num_seats + seat) == 0:
        return
    largest, total = join_chunks(maxima, sums, b, CHUNKS, BLOCK_C)
    bound = lower_bound(largest, total, tl.load(numbers + MIN_P * num_seats + seat))
    stored = m < tl.load(num_candidates + b)
    z = tl.load(candidate_values + b * MAX + m, stored, float("-inf"))
    v = tl.load(candidate_places + b * MAX + m, stored, 0)
    noisy = add_noise(z, v, draw_state(integers, seat, num_seats))
    tl.store(candidates + b * MAX + m, tl.where(stored & (noisy > bound), noisy, float("-inf")))


@triton.jit
def choose_tokens(
    chosen, places, ranks, masses, num_candidates, candidates, candidate_values, candidate_places,
    maxima, sums, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
    MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row and advance the columns of its seat.

    chosen (B,): receives the token, or -1 if the logits are not finite.
    """
    wait_for_previous(PDL)
    b = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + b)
    if seat < 0:
        return
    c = tl.arange(0, BLOCK_C)
    chunk_maxima = tl.load(maxima + b * CHUNKS + c, c < CHUNKS, float("-inf"))
    is_nan = tl.max((chunk_maxima != chunk_maxima).to(tl.int32), 0)
    largest, total = join_chunks(maxima, sums, b, CHUNKS, BLOCK_C)
    token = tl.min(tl.where(chunk_maxima == largest, tl.load(places + b * CHUNKS + c, c < CHUNKS, V), V), 0)
    is_finite = (tl.abs(largest) < float("inf")) & (is_nan == 0)
    if (tl.load(numbers + TEMPERATURE * num_seats + seat) > 0) & is_finite:
        token = choose_candidate(
            token, largest, total, ranks, masses, num_candidates, candidates, candidate_values, candidate_places, b,
            logits + b * V, seat, integers, numbers, counts, bias, num_seats, V, ADJUST, CHUNKS, BLOCK_C, BLOCK, MAX,
        )  # fmt: skip
    token = tl.where(is_finite, token, 0)
    tl.store(chosen + b, tl.where(is_finite, token, -1))
    tl.store(integers + TOKEN * num_seats + seat, token.to(tl.int64))
    for row in tl.static_range(POSITION, STEP + 1):
        tl.store(integers + row * num_seats + seat, tl.load(integers + row * num_seats + seat) + 1)
    if ADJUST:
        adjusted = tl.load(integers + ADJUSTED * num_seats + seat) != 0
        place = counts + seat.to(tl.int64) * V + token
        tl.store(place, tl.load(place, adjusted, 0) + 1, adjusted)


@triton.jit
def choose_candidate(
    top, largest, total, ranks, masses, num_candidates, candidates, candidate_values, candidate_places, b,
    logits, seat, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
    MAX: tl.constexpr,
):  # fmt: skip
    """Return the winner of the draw among the tokens that the filters keep; `top`, the most likely one, always is."""
    top_k = tl.load(integers + TOP_K * num_seats + seat).to(tl.int32)
    tail = tl.load(numbers + TAIL * num_seats + seat)
    number = tl.load(num_candidates + b)
    token, value = best_before(
        candidates, candidate_values, candidate_places, b, tl.minimum(number, MAX), float("-inf"), V, V, MAX
    )  # fmt: skip
    is_known = (token != V) & (number <= MAX)
    verdict = tl.where(is_known, 1, 0)
    if is_known & ((top_k > 0) | (tail >= 0)) & (token != top):
        verdict = judge(ranks, masses, b, 0, top_k, tail, total, CHUNKS, BLOCK_C)
        for which in range(1, 4):
            if verdict == -1:
                token, value = best_before(
                    candidates, candidate_values, candidate_places, b, number, value, token, V, MAX
                )  # fmt: skip
                verdict = judge(ranks, masses, b, which, top_k, tail, total, CHUNKS, BLOCK_C)
                verdict = tl.where(token == top, 1, tl.where(token == V, 0, verdict))
        is_known = is_known & (token != V)
    if verdict != 1:
        if is_known == 0:
            token = draw_before(
                float("-inf"), V, float("-inf"), logits, seat, integers, numbers, counts, bias, num_seats,
                V, ADJUST, BLOCK,
            )  # fmt: skip
        token = filter_draw(
            token, top, largest, total, logits, seat, integers, numbers, counts, bias, num_seats, V, ADJUST, BLOCK
        )
    return token
