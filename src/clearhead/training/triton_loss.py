"""The cross-entropy of many tokens and its gradient in one kernel, on an NVIDIA GPU.

    lose_rows[num_rows,](totals, plains, logits, targets, ...)      logits become their gradient, in place

A program looks at its row twice, and finds some of it in the cache the second time: 65,536 rows of GPT-2's logits take
4.7 ms on an H200, where one read and one write of them would take 3.2. Rows held whole in registers took 12 ms, few
programs that go from row to row 5. Its twin is loss.cross_entropy with autograd (tests/training/test_head_loss.py).
"""

import triton
import triton.language as tl


@triton.jit
def lose_rows(
    totals, plains, logits, targets,
    smoothing, z_weight,
    V: tl.constexpr, IGNORED: tl.constexpr, SMOOTHED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits (M, V), targets (M,) -> totals and plains (M,): the loss of each row, with and without smoothing and z."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    asked = target != IGNORED
    # Before the first sum, where all threads meet: below, its place is overwritten.
    wanted = tl.load(logits + target, asked, 0.0).to(tl.float32)
    places = tl.arange(0, BLOCK)
    highest, weight, whole = -3e38, 0.0, 0.0  # not -inf, which a block of logits may be and cannot be taken from
    for start in range(0, V, BLOCK):
        within = start + places < V
        x = tl.load(logits + start + places, within, -float("inf")).to(tl.float32)
        above = tl.maximum(highest, tl.max(x))
        weight = weight * tl.exp(highest - above) + tl.sum(tl.exp(x - above))
        highest = above
        if SMOOTHED:
            whole += tl.sum(tl.where(within, x, 0.0))
    log_z = highest + tl.log(weight)
    plain = log_z - wanted
    total = plain + z_weight * log_z * log_z
    if SMOOTHED:
        total += smoothing * (wanted - whole / V)
    tl.store(plains + row, tl.where(asked, plain, 0.0))
    tl.store(totals + row, tl.where(asked, total, 0.0))
    if GRADIENT:
        steepness = tl.where(asked, 1.0 + 2.0 * z_weight * log_z, 0.0)
        everywhere = tl.where(asked, smoothing / V, 0.0)
        for start in range(0, V, BLOCK):
            place = start + places
            x = tl.load(logits + place, place < V, -float("inf")).to(tl.float32)
            gradient = steepness * tl.exp(x - log_z) - everywhere
            gradient -= tl.where(place == target, 1.0 - smoothing, 0.0)  # no place is IGNORED, which is negative
            tl.store(logits + place, gradient.to(logits.dtype.element_ty), place < V)
