"""Triton kernels that turn logits into tokens without sorting the vocabulary; sampling/choose.py is their reference.

    scan_logits[B, chunks](...)      per chunk: the largest logit, Σ exp, and the winner of the Gumbel-max draw
    choose_tokens[B](...)            join the chunks, apply top_k, top_p and min_p, store the token

The filters keep the first tokens in the order of likelihood (of equal tokens, the one with the lower id first). The
winner of the draw over all tokens is therefore also the winner over those that the filters keep, if they keep it, and
one pass over the logits decides that. If they do not, the draw is repeated among the tokens before it in that order.
"""

import triton
import triton.language as tl

# Rows of the columns that a seat has: `integers` (rows, seats) int64 and `numbers` (rows, seats) float32.
TOKEN, POSITION, STEP, SEED, TOP_K, MIN_NEW, ADJUSTED = (tl.constexpr(row) for row in range(7))
TEMPERATURE, TAIL, MIN_P, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(row) for row in range(6))
# Bits of an entry of `counts` (seats, V) int32; the other bits count the token in the output.
IN_PROMPT, IS_STOP = tl.constexpr(1 << 30), tl.constexpr(1 << 29)
_COUNT = tl.constexpr((1 << 29) - 1)
# SplitMix64 (sampling/randomness.py).
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def splitmix(seed, index):
    """Return number `index` of SplitMix64 started at `seed`; both uint64."""
    z = seed + (index + 1) * _GOLDEN
    z = (z ^ (z >> 30)) * _FIRST_FACTOR
    z = (z ^ (z >> 27)) * _SECOND_FACTOR
    return z ^ (z >> 31)


@triton.jit
def add_noise(z, v, state):
    """Return z + Gumbel noise of the tokens v in float64; state: splitmix(seed, step)."""
    numbers = splitmix(state, v.to(tl.uint64)) >> 12
    u = (numbers.to(tl.float64) + 0.5) * 2.0**-52
    return z.to(tl.float64) - tl.log(-tl.log(u))


@triton.jit
def read_logits(
    logits, v, seat, integers, numbers, counts, bias, num_seats, V: tl.constexpr, ADJUST: tl.constexpr
):  # fmt: skip
    """Load the logits of the tokens v of a row and apply bias, penalties, min_new_tokens and temperature."""
    x = tl.load(logits + v, v < V, float("-inf")).to(tl.float32)
    if ADJUST:
        adjusted = v < tl.where(tl.load(integers + ADJUSTED * num_seats + seat) != 0, V, 0)
        place = seat.to(tl.int64) * V + v
        x += tl.load(bias + place, adjusted, 0.0)
        count = tl.load(counts + place, adjusted, 0)
        output = count & _COUNT
        penalty = tl.load(numbers + REPETITION * num_seats + seat)
        penalized = tl.where(x < 0, x * penalty, tl.div_rn(x, penalty + tl.zeros_like(x)))
        x = tl.where((output > 0) | ((count & IN_PROMPT) != 0), penalized, x)
        x -= output.to(tl.float32) * tl.load(numbers + FREQUENCY * num_seats + seat)
        x -= (output > 0).to(tl.float32) * tl.load(numbers + PRESENCE * num_seats + seat)
        is_early = tl.load(integers + STEP * num_seats + seat) < tl.load(integers + MIN_NEW * num_seats + seat)
        x = tl.where(is_early & ((count & IS_STOP) != 0), float("-inf"), x)
    temperature = tl.load(numbers + TEMPERATURE * num_seats + seat)
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0) + tl.zeros_like(x))


@triton.jit
def scan_logits(
    maxima, places, sums, bests, best_places, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce one chunk of the logits (B, V) of one row. The maximum is NaN if a logit is.

    maxima, sums (B, chunks) float32: the largest value and Σ exp(value - largest). bests (B, chunks) float64: the
    largest value with noise. places, best_places (B, chunks) int32: their tokens.
    """
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seat = tl.load(seats + b)
    if seat < 0:
        return
    logits += b * V
    draws = tl.load(numbers + TEMPERATURE * num_seats + seat) > 0
    seed = tl.load(integers + SEED * num_seats + seat).to(tl.uint64, bitcast=True)
    state = splitmix(seed, tl.load(integers + STEP * num_seats + seat).to(tl.uint64, bitcast=True))
    largest, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    place, best_place = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    best = tl.full((), float("-inf"), tl.float64)
    has_nan = tl.full((), 0, tl.int32)
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = read_logits(logits, v, seat, integers, numbers, counts, bias, num_seats, V, ADJUST)
        has_nan |= tl.max((z != z).to(tl.int32), 0)
        block_largest = tl.max(z, 0)
        if block_largest > largest:
            total *= tl.exp(largest - block_largest)
            largest = block_largest
            place = tl.min(tl.where(z == block_largest, v, V), 0)
        if draws:
            total += tl.sum(tl.exp(z - tl.maximum(largest, -1e38)), 0)
            noisy = add_noise(z, v, state)
            block_best = tl.max(noisy, 0)
            if block_best > best:
                best = block_best
                best_place = tl.min(tl.where(noisy == block_best, v, V), 0)
    target = b * tl.num_programs(1) + chunk
    tl.store(maxima + target, tl.where(has_nan != 0, float("nan"), largest))
    tl.store(places + target, place)
    tl.store(sums + target, total)
    tl.store(bests + target, best)
    tl.store(best_places + target, best_place)


@triton.jit
def choose_tokens(
    chosen, maxima, places, sums, bests, best_places, logits, seats, integers, numbers, counts, bias, num_seats,
    V: tl.constexpr, ADJUST: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row from what `scan_logits` found, and advance the columns of its seat.

    chosen (B,): receives the token, or -1 if the logits are not finite.
    """
    b = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + b)
    if seat < 0:
        return
    logits += b * V
    c = tl.arange(0, BLOCK_C)
    chunk_maxima = tl.load(maxima + b * CHUNKS + c, c < CHUNKS, float("-inf"))
    is_nan = tl.max((chunk_maxima != chunk_maxima).to(tl.int32), 0) != 0
    largest = tl.max(chunk_maxima, 0)
    top = tl.min(tl.where(chunk_maxima == largest, tl.load(places + b * CHUNKS + c, c < CHUNKS, V), V), 0)
    token = top
    if (tl.load(numbers + TEMPERATURE * num_seats + seat) > 0) & (tl.abs(largest) < float("inf")):
        weights = tl.exp(chunk_maxima - largest).to(tl.float64)
        total = tl.sum(tl.load(sums + b * CHUNKS + c, c < CHUNKS, 0.0).to(tl.float64) * weights, 0)
        noisy = tl.load(bests + b * CHUNKS + c, c < CHUNKS, float("-inf"))
        best = tl.max(noisy, 0)
        token = tl.min(tl.where(noisy == best, tl.load(best_places + b * CHUNKS + c, c < CHUNKS, V), V), 0)
        token = filter_draw(
            token, top, largest, total, logits, seat, integers, numbers, counts, bias, num_seats, V, ADJUST, BLOCK
        )
    is_finite = (tl.abs(largest) < float("inf")) & (is_nan == 0)
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
    seed = tl.load(integers + SEED * num_seats + seat).to(tl.uint64, bitcast=True)
    state = splitmix(seed, tl.load(integers + STEP * num_seats + seat).to(tl.uint64, bitcast=True))
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
