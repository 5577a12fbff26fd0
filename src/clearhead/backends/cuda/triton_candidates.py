"""Compare the candidates of a draw with all other tokens, to decide what top_k and top_p do with them.

check_candidates[B, chunks](...)   which probability comes after the best candidates, and how many tokens before
judge(...)                         whether the filters keep one of them
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_logits import TAIL, TEMPERATURE, TOP_K, read_logits, wait_for_previous


@triton.jit
def join_chunks(maxima, sums, b, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the largest value of a row, and Σ exp(value - largest)."""
    c = tl.arange(0, BLOCK_C)
    chunk_maxima = tl.load(maxima + b * CHUNKS + c, c < CHUNKS, float("-inf"))
    largest = tl.max(chunk_maxima, 0)
    weights = tl.exp(chunk_maxima - tl.maximum(largest, -1e38)).to(tl.float64)
    return largest, tl.sum(tl.load(sums + b * CHUNKS + c, c < CHUNKS, 0.0).to(tl.float64) * weights, 0)


@triton.jit
def best_before(
    candidates, candidate_values, candidate_places, b, number, value, token, V: tl.constexpr, MAX: tl.constexpr
):
    """Return the candidate before (value, token) with the largest noisy value, or V, and its value without noise."""
    m = tl.arange(0, MAX)
    noisy = tl.load(candidates + b * MAX + m, m < number, float("-inf"))
    is_candidate = (m < number) & (noisy > float("-inf"))
    z = tl.load(candidate_values + b * MAX + m, is_candidate, float("-inf"))
    v = tl.load(candidate_places + b * MAX + m, is_candidate, V)
    is_before = is_candidate & ((z > value) | ((z == value) & (v < token)))
    best = tl.max(tl.where(is_before, noisy, float("-inf")), 0)
    place = tl.min(tl.where(is_before & (noisy == best), v, V), 0)
    return place, tl.max(tl.where(v == place, z, float("-inf")), 0)


@triton.jit
def check_candidates(
    ranks, masses, num_candidates, candidates, candidate_values, candidate_places,
    maxima, sums, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, MAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compare the tokens of one chunk with the first four candidates, each the best one before the previous.

    ranks (B, chunks, 6): numbers of tokens above each, and within 2 and 6 of the largest value.
    masses (B, chunks, 6): Σ exp of each candidate and what comes after it, and of the tokens within 2 and 6.
    """
    wait_for_previous(PDL)
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
