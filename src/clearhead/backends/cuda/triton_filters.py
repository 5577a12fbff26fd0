"""Apply top_k, top_p and min_p to a draw by passes over all logits of a row, which triton_sampling.py mostly avoids."""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_logits import MIN_P, TAIL, TOP_K, add_noise, draw_state, read_logits


@triton.jit
def filter_draw(
    token, top, largest, total, logits, seat, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return `token` if top_k, top_p and min_p keep it, else the winner of the draw among the tokens they keep.

    largest: the largest value, of the token `top`, which is always kept. total: Σ exp(value - largest).
    """
    top_k = tl.load(integers + TOP_K * num_seats + seat).to(tl.int32)
    tail = tl.load(numbers + TAIL * num_seats + seat)
    min_p = tl.load(numbers + MIN_P * num_seats + seat)
    threshold = tl.full((), float("-inf"), tl.float32)  # top_k keeps the values from here on
    if (top_k > 0) & (tail >= 0):  # top_p counts the probability of what top_k keeps
        threshold, total = find_threshold(
            top_k, largest, logits, seat, integers, numbers, counts, bias, num_seats, V, ADJUST, BLOCK
        )
    undecided = (token != top) & ((top_k > 0) | (tail >= 0) | (min_p > 0))
    while undecided:
        own = token + tl.arange(0, 1)
        value = tl.max(read_logits(logits, own, seat, integers, numbers, counts, bias, num_seats, V, ADJUST), 0)
        num_above, mass = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float64)
        if (top_k > 0) | (tail >= 0):
            for start in range(0, V, BLOCK):
                v = start + tl.arange(0, BLOCK)
                z = read_logits(logits, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
                num_above += (z > value).to(tl.int32)
                is_cut = (z >= threshold) & ((z < value) | ((z == value) & (v >= token)))
                mass += tl.where(is_cut, tl.exp(z - largest), 0.0).to(tl.float64)
        by_count = ((top_k > 0) & (tl.sum(num_above, 0) >= top_k)) | (value < threshold)
        by_value = (min_p > 0) & (tl.exp(value - largest) < min_p)
        by_mass = (tail >= 0) & ((tl.sum(mass, 0) / total).to(tl.float32) <= tail)
        if by_count & (threshold == float("-inf")):
            threshold, _ = find_threshold(
                top_k, largest, logits, seat, integers, numbers, counts, bias, num_seats, V, ADJUST, BLOCK
            )
        undecided = by_count | by_value | by_mass
        if undecided:
            lowest = tl.maximum(threshold, tl.where(min_p > 0, largest + tl.log(min_p) - 1e-3, float("-inf")))
            token = draw_before(
                value, token, lowest, logits, seat, integers, numbers, counts, bias, num_seats, V, ADJUST, BLOCK
            )
            undecided = token != top
    return token


@triton.jit
def draw_before(
    value, token, lowest, logits, seat, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the winner of the draw among the tokens before (value, token) whose value is at least `lowest`."""
    state = draw_state(integers, seat, num_seats)
    best, best_place = tl.full((), float("-inf"), tl.float64), tl.full((), V, tl.int32)
    PART: tl.constexpr = BLOCK // 4
    for start in range(0, V, PART):
        v = start + tl.arange(0, PART)
        z = read_logits(logits, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
        is_before = (z >= lowest) & ((z > value) | ((z == value) & (v < token)))
        if tl.max(is_before.to(tl.int32), 0) != 0:
            noisy = tl.where(is_before, add_noise(z, v, state), float("-inf"))
            part_best = tl.max(noisy, 0)
            if part_best > best:
                best = part_best
                best_place = tl.min(tl.where(noisy == part_best, v, V), 0)
    return best_place


@triton.jit
def find_threshold(
    top_k, largest, logits, seat, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the top_k-th largest value, and Σ exp(value - largest) over all values from it on.

    Bisection: at least top_k values reach `low`, fewer reach `high`. Both become values that occur, or their neighbors,
    in every pass, so that few passes suffice.
    """
    low, high = tl.full((), float("-inf"), tl.float32), tl.full((), float("inf"), tl.float32)
    below_high = largest  # the largest value below `high`
    width, mass = tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float64)
    searching = top_k > 0
    while searching:
        middle = low + (high - low) / 2
        pivot = tl.where((middle > low) & (middle <= below_high), middle, below_high)
        pivot = tl.where(low > float("-inf"), pivot, largest - width)  # first, look for any lower bound
        width *= 4
        counts_above, masses = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.float64)
        above, below = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            z = read_logits(logits, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
            is_above = z >= pivot
            counts_above += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp(z - largest), 0.0).to(tl.float64)
            above = tl.minimum(above, tl.where(is_above, z, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), z))
        num_above = tl.sum(counts_above, 0)
        if num_above >= top_k:
            low = tl.min(above, 0)
            mass = tl.sum(masses, 0)
        else:
            high = pivot
            below_high = tl.max(below, 0)
        searching = (num_above != top_k) & (below_high > low) & (pivot > float("-inf"))
    return low, mass
