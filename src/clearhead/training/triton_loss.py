"""Compute the cross-entropy of many tokens and its gradient in one Triton kernel, on an NVIDIA GPU.

    cross_entropy_kernel[num_rows,](totals, plains, logits, targets, ...)    # the gradient overwrites the logits

A program reads its row twice and finds part of it in the cache the second time: 65,536 rows of GPT-2's logits take
4.7 ms on an H200, where one read and one write of them would take 3.2. Keeping whole rows in registers took 12 ms, and
few programs that loop over rows 5. Tests compare it with loss.cross_entropy and autograd.
"""

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    totals, plains, logits, targets,
    smoothing, z_weight,
    V: tl.constexpr, IGNORED: tl.constexpr, SMOOTHED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits (M, V), targets (M,) -> totals, plains (M,): the loss per row, with and without smoothing and z-loss."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    has_target = target != IGNORED
    # Read before the first reduction, which synchronizes all threads: the loop at the end overwrites this logit.
    target_logit = tl.load(logits + target, has_target, 0.0).to(tl.float32)
    offsets = tl.arange(0, BLOCK)
    highest, denominator, logit_sum = -3e38, 0.0, 0.0  # not -inf: if a block is all -inf, -inf minus -inf is NaN
    for start in range(0, V, BLOCK):
        in_row = start + offsets < V
        x = tl.load(logits + start + offsets, in_row, -float("inf")).to(tl.float32)
        new_highest = tl.maximum(highest, tl.max(x))
        denominator = denominator * tl.exp(highest - new_highest) + tl.sum(tl.exp(x - new_highest))
        highest = new_highest
        if SMOOTHED:
            logit_sum += tl.sum(tl.where(in_row, x, 0.0))
    log_z = highest + tl.log(denominator)
    plain = log_z - target_logit
    total = plain + z_weight * log_z * log_z
    if SMOOTHED:
        total += smoothing * (target_logit - logit_sum / V)
    tl.store(plains + row, tl.where(has_target, plain, 0.0))
    tl.store(totals + row, tl.where(has_target, total, 0.0))
    if GRADIENT:
        slope = tl.where(has_target, 1.0 + 2.0 * z_weight * log_z, 0.0)
        uniform = tl.where(has_target, smoothing / V, 0.0)
        for start in range(0, V, BLOCK):
            index = start + offsets
            x = tl.load(logits + index, index < V, -float("inf")).to(tl.float32)
            gradient = slope * tl.exp(x - log_z) - uniform
            gradient -= tl.where(index == target, 1.0 - smoothing, 0.0)  # IGNORED is negative, so it equals no index
            tl.store(logits + index, gradient.to(logits.dtype.element_ty), index < V)
