"""Triton functions that the sampling kernels share: logits with the options of their seat, and random numbers."""

import triton
import triton.language as tl

# The fields of a seat: `integers` (fields, seats) int64 and `numbers` (fields, seats) float32.
TOKEN, POSITION, STEP, SEED, TOP_K, MIN_NEW, ADJUSTED = (tl.constexpr(number) for number in range(7))
TEMPERATURE, TAIL, MIN_P, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(number) for number in range(6))
# Bits of an entry of `counts` (seats, V) int32; the other bits count the token in the output.
IN_PROMPT, IS_STOP = tl.constexpr(1 << 30), tl.constexpr(1 << 29)
_COUNT = tl.constexpr((1 << 29) - 1)
# SplitMix64 (sampling/randomness.py).
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """With PDL, let the next kernel start, and wait until the previous one has ended (triton_products.py)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def count_up(seed, index):
    """Return the state of SplitMix64, started at `seed`, from which its number `index` is computed; all uint64."""
    return seed + (index + 1) * GOLDEN


@triton.jit
def scramble(z):
    """Return the number that SplitMix64 computes from a state; uint64."""
    z = (z ^ (z >> 30)) * _FIRST_FACTOR
    z = (z ^ (z >> 27)) * _SECOND_FACTOR
    return z ^ (z >> 31)


@triton.jit
def splitmix(seed, index):
    """Return number `index` of SplitMix64 started at `seed`; both uint64."""
    return scramble(count_up(seed, index))


@triton.jit
def draw_state(integers, seat, num_seats):
    """Return the state of the random numbers of a seat in its present step."""
    seed = tl.load(integers + SEED * num_seats + seat).to(tl.uint64, bitcast=True)
    return splitmix(seed, tl.load(integers + STEP * num_seats + seat).to(tl.uint64, bitcast=True))


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
