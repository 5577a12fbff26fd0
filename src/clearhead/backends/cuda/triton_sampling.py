"""Triton kernels that turn logits into tokens without sorting the vocabulary; sampling/choose.py is their reference.

    scan_logits[B, chunks](...)        per chunk: the largest value and Σ exp
    draw_candidates[B, chunks](...)    the tokens whose value with Gumbel noise is large enough to win the draw
    check_candidates[B, chunks](...)   which probability comes after the best of them, and how many tokens before
    choose_tokens[B](...)              join the chunks, apply the filters, store the token

The filters top_k, top_p and min_p keep the first tokens in the order of likelihood; of equal tokens, the one with the
lower id is first. The winner of the draw over all tokens is therefore also the winner over those that the filters keep,
if they keep it. Otherwise the best candidate that comes before it is next. If no candidate decides, which is rare,
triton_filters.py searches all tokens again.
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_filters import draw_before, filter_draw
from clearhead.backends.cuda.triton_logits import (
    ADJUSTED,
    GOLDEN,
    MIN_P,
    POSITION,
    SEED,
    STEP,
    TAIL,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    add_noise,
    count_up,
    read_logits,
    scramble,
    splitmix,
)

# The winner's value is log Σ exp(value) plus Gumbel noise, which is above -3 except once in 5·10⁸ draws.
_MARGIN = tl.constexpr(3.0)  # about e³ = 20 tokens exceed the bound


@triton.jit
def scan_logits(
    maxima, places, sums, num_candidates, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce one chunk of the logits (B, V) of one row. The maximum is NaN if a logit is.

    maxima, sums (B, chunks) float32: the largest value and Σ exp(value - largest); places (B, chunks) int32: its token.
    """
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
def join_chunks(maxima, sums, b, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the largest value of a row, and Σ exp(value - largest)."""
    c = tl.arange(0, BLOCK_C)
    chunk_maxima = tl.load(maxima + b * CHUNKS + c, c < CHUNKS, float("-inf"))
    largest = tl.max(chunk_maxima, 0)
    weights = tl.exp(chunk_maxima - tl.maximum(largest, -1e38)).to(tl.float64)
    return largest, tl.sum(tl.load(sums + b * CHUNKS + c, c < CHUNKS, 0.0).to(tl.float64) * weights, 0)


@triton.jit
def draw_candidates(
    num_candidates, candidates, candidate_values, candidate_places,
    maxima, sums, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Collect the tokens whose value with noise exceeds a bound that the winner exceeds almost surely.

    num_candidates (B,) may exceed MAX, but only MAX are stored. candidates (B, MAX) float64: their values with noise;
    candidate_values (B, MAX) float32: without it; candidate_places (B, MAX) int32: their tokens.
    """
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seat = tl.load(seats + b)
    if seat < 0:
        return
    if tl.load(numbers + TEMPERATURE * num_seats + seat) == 0:
        return
    largest, total = join_chunks(maxima, sums, b, CHUNKS, BLOCK_C)
    min_p = tl.load(numbers + MIN_P * num_seats + seat)
    # What min_p removes cannot win. The rest may have little of the probability, but at least that of the first token.
    lowest = tl.where(min_p > 0, largest + tl.log(min_p), float("-inf"))
    bound = largest - _MARGIN + tl.where(min_p > 0, 0.0, tl.log(total.to(tl.float32)))
    seed = tl.load(integers + SEED * num_seats + seat).to(tl.uint64, bitcast=True)
    state = splitmix(seed, tl.load(integers + STEP * num_seats + seat).to(tl.uint64, bitcast=True))
    counters = count_up(state, (chunk * CHUNK + tl.arange(0, BLOCK)).to(tl.uint64))
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = read_logits(logits + b * V, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
        # -log(-log(u)) > bound - z means -log(u) < exp(z - bound), and 1 - u is less than -log(u). Few tokens pass
        # this test of the upper 32 bits of u, so that the exact one in float64 is rarely needed.
        upper = (scramble(counters) >> 32).to(tl.uint32)
        counters += tl.full((BLOCK,), BLOCK, tl.uint64) * GOLDEN
        rest = (upper ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32
        passes = (rest < tl.exp(z - bound) * 1.00001 + 1e-12) & (z >= lowest)
        if tl.max(passes.to(tl.int32), 0) != 0:
            noisy = add_noise(z, v, state)
            passes = passes & (noisy > bound)
            ones = passes.to(tl.int32)
            place = tl.atomic_add(num_candidates + b, tl.sum(ones, 0), sem="relaxed") + tl.cumsum(ones, 0) - 1
            stored = passes & (place < MAX)
            tl.store(candidates + b * MAX + place, noisy, stored)
            tl.store(candidate_values + b * MAX + place, z, stored)
            tl.store(candidate_places + b * MAX + place, v, stored)


@triton.jit
def best_before(
    candidates, candidate_values, candidate_places, b, number, value, token, V: tl.constexpr, MAX: tl.constexpr
):
    """Return the candidate before (value, token) with the largest noisy value, or V, and its value without noise."""
    m = tl.arange(0, MAX)
    z = tl.load(candidate_values + b * MAX + m, m < number, float("-inf"))
    v = tl.load(candidate_places + b * MAX + m, m < number, V)
    is_before = (m < number) & ((z > value) | ((z == value) & (v < token)))
    noisy = tl.where(is_before, tl.load(candidates + b * MAX + m, m < number, float("-inf")), float("-inf"))
    best = tl.max(noisy, 0)
    place = tl.min(tl.where(is_before & (noisy == best), v, V), 0)
    return place, tl.max(tl.where(v == place, z, float("-inf")), 0)


@triton.jit
def check_candidates(
    ranks, masses, num_candidates, candidates, candidate_values, candidate_places,
    maxima, sums, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Compare the tokens of one chunk with the first four candidates, each the best one before the previous.

    ranks (B, chunks, 6): numbers of tokens above each, and within 2 and 6 of the largest value.
    masses (B, chunks, 6): Σ exp of each candidate and what comes after it, and of the tokens within 2 and 6.
    """
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seat = tl.load(seats + b)
    if seat < 0:
        return
    top_k = tl.load(integers + TOP_K * num_seats + seat)
    if (tl.load(numbers + TAIL * num_seats + seat) < 0) & (top_k == 0):
        return
    number = tl.minimum(tl.load(num_candidates + b), MAX)
    if (tl.load(numbers + TEMPERATURE * num_seats + seat) == 0) | (number == 0):
        return
    largest, _ = join_chunks(maxima, sums, b, CHUNKS, BLOCK_C)
    t0, z0 = best_before(candidates, candidate_values, candidate_places, b, number, float("-inf"), V, V, MAX)
    t1, z1 = best_before(candidates, candidate_values, candidate_places, b, number, z0, t0, V, MAX)
    t2, z2 = best_before(candidates, candidate_values, candidate_places, b, number, z1, t1, V, MAX)
    t3, z3 = best_before(candidates, candidate_values, candidate_places, b, number, z2, t2, V, MAX)
    target = (b * CHUNKS + chunk) * 6
    m0, m1 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    m2, m3 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = read_logits(logits + b * V, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
        weight = tl.exp(z - largest)
        m0 += tl.where((z < z0) | ((z == z0) & (v >= t0)), weight, 0.0)
        m1 += tl.where((z < z1) | ((z == z1) & (v >= t1)), weight, 0.0)
        m2 += tl.where((z < z2) | ((z == z2) & (v >= t2)), weight, 0.0)
        m3 += tl.where((z < z3) | ((z == z3) & (v >= t3)), weight, 0.0)
    tl.store(masses + target, tl.sum(m0, 0))
    tl.store(masses + target + 1, tl.sum(m1, 0))
    tl.store(masses + target + 2, tl.sum(m2, 0))
    tl.store(masses + target + 3, tl.sum(m3, 0))
    if top_k > 0:
        for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
            v = start + tl.arange(0, BLOCK)
            z = read_logits(logits + b * V, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
            count_above(ranks + target, z, z0, z1, z2, z3, largest, start == chunk * CHUNK)
            sum_within(masses + target, z, largest, start == chunk * CHUNK)


@triton.jit
def count_above(ranks, z, z0, z1, z2, z3, largest, is_first):
    """Add the numbers of values above z0 to z3, and from `largest` - 2 and - 6 on, to six counters."""
    tl.store(ranks, tl.sum((z > z0).to(tl.int32), 0) + tl.load(ranks, is_first == 0, 0))
    tl.store(ranks + 1, tl.sum((z > z1).to(tl.int32), 0) + tl.load(ranks + 1, is_first == 0, 0))
    tl.store(ranks + 2, tl.sum((z > z2).to(tl.int32), 0) + tl.load(ranks + 2, is_first == 0, 0))
    tl.store(ranks + 3, tl.sum((z > z3).to(tl.int32), 0) + tl.load(ranks + 3, is_first == 0, 0))
    tl.store(ranks + 4, tl.sum((z >= largest - 2).to(tl.int32), 0) + tl.load(ranks + 4, is_first == 0, 0))
    tl.store(ranks + 5, tl.sum((z >= largest - 6).to(tl.int32), 0) + tl.load(ranks + 5, is_first == 0, 0))


@triton.jit
def sum_within(masses, z, largest, is_first):
    """Add Σ exp(z - largest) of the values from `largest` - 2 and - 6 on to the last two of six sums."""
    weight = tl.exp(z - largest)
    tl.store(masses + 4, tl.sum(tl.where(z >= largest - 2, weight, 0.0), 0) + tl.load(masses + 4, is_first == 0, 0.0))
    tl.store(masses + 5, tl.sum(tl.where(z >= largest - 6, weight, 0.0), 0) + tl.load(masses + 5, is_first == 0, 0.0))


@triton.jit
def judge(ranks, masses, b, which, top_k, tail, total, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return 1 if the filters keep candidate number `which`, -1 if they remove it, and 0 if that is not known."""
    c = tl.arange(0, BLOCK_C)
    place, counted = (b * CHUNKS + c) * 6, c < tl.where(top_k > 0, CHUNKS, 0)
    above = tl.sum(tl.load(ranks + place + which, counted, 0), 0)
    within = tl.sum(tl.load(ranks + place + 4, counted, 0), 0)
    within_more = tl.sum(tl.load(ranks + place + 5, counted, 0), 0)
    cut = tl.sum(tl.load(masses + place + which, c < CHUNKS, 0.0).to(tl.float64), 0)
    mass_within = tl.sum(tl.load(masses + place + 4, counted, 0.0).to(tl.float64), 0)
    mass_within_more = tl.sum(tl.load(masses + place + 5, counted, 0.0).to(tl.float64), 0)
    removed = ((top_k > 0) & (above >= top_k)) | ((tail >= 0) & ((cut / total).to(tl.float32) <= tail))
    # With both filters, top_p counts the probability of what top_k keeps, which is at least that of a smaller set.
    kept_mass = tl.where(within <= top_k, mass_within, 0.0)
    kept_mass = tl.where(within_more <= top_k, mass_within_more, kept_mass)
    before = total - cut
    is_kept = (tail < 0) | (((kept_mass - before) / tl.maximum(kept_mass, 1e-30)).to(tl.float32) > tail + 1e-6)
    return tl.where(removed, -1, tl.where(is_kept | (top_k == 0), 1, 0))


@triton.jit
def choose_tokens(
    chosen, places, ranks, masses, num_candidates, candidates, candidate_values, candidate_places,
    maxima, sums, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
    MAX: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row and advance the columns of its seat.

    chosen (B,): receives the token, or -1 if the logits are not finite.
    """
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
    is_known = (number > 0) & (number <= MAX)
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
